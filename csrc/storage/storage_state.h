// The parts of a ShardStorage, under one lock, and what takes several of them: planes that move or go.
// Leases keep it alive, too: they may outlive the ShardStorage.
#pragma once
#include <vector>

#include "base/process.h"
#include "storage/leases.h"

namespace ds::storage {

struct StorageState {
  StorageState(c10::Device device, const Budget& budget, const FileAccess& files);

  // As in ShardStorage.
  void move(std::vector<int32_t> numbers, const Placement& placement, bool wait_each);
  void remove(int32_t number);
  void discard(int32_t number, plan::Range range);
  bool occupy(int32_t number, plan::Range range);
  // The storage has gone: nobody acquires anything any more. A lease of scratch must not keep the memory of planes.
  void close();

  // In a forked child a thread of the parent may have the lock for ever: what ends there ends without it.
  const OwningProcess owner;
  const c10::Device device;
  const Tiers tiers;
  StorageLock lock;
  MemoryAccounts memory;
  PlaneTable planes;
  BlockCopies copies;
  Prefetches prefetches;
  Leases leases;
  BackgroundTransfers background;  // last: its jobs use all of the above

 private:
  void lock_plane(StorageLock::Held& held, Plane& plane);
};

}  // namespace ds::storage
