// Copies of blocks that are fetched before anybody asks for them. They wait in Plane::prefetched.
#pragma once
#include "storage/background_transfers.h"
#include "storage/block_copies.h"
#include "storage/plane_table.h"

namespace ds::storage {

class Prefetches {
 public:
  Prefetches(StorageLock& lock, MemoryAccounts& memory, PlaneTable& planes, BlockCopies& copies,
             BackgroundTransfers& background)
      : lock_(lock), memory_(memory), planes_(planes), copies_(copies), background_(background) {}

  // As in ShardStorage.
  void prefetch(int32_t number, plan::Range range, Medium at);
  bool here(int32_t number, plan::Range range, Medium at);

  // The others with the lock.
  // The copy of exactly these blocks, out of the plane's list; waits while it is fetched. Null: there is none.
  StagingPtr take(StorageLock::Held& lock, Plane& plane, int32_t first, int32_t end, Medium at);
  // Drops the copies that have one of these blocks.
  void drop(Plane& plane, int32_t first, int32_t end);

 private:
  void fetch(const PlanePtr& plane, const StagingPtr& copy);

  StorageLock& lock_;
  MemoryAccounts& memory_;
  PlaneTable& planes_;
  BlockCopies& copies_;
  BackgroundTransfers& background_;
};

}  // namespace ds::storage
