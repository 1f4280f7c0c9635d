// Leases of ranges of planes, and of scratch: from acquire() to the end of the write back.
#pragma once
#include "storage/prefetches.h"
#include "storage/shard_storage.h"

namespace ds::storage {

class Leases {
 public:
  Leases(StorageLock& lock, MemoryAccounts& memory, PlaneTable& planes, BlockCopies& copies, Prefetches& prefetches,
         BackgroundTransfers& background)
      : lock_(lock),
        memory_(memory),
        planes_(planes),
        copies_(copies),
        prefetches_(prefetches),
        background_(background) {}

  // As in ShardStorage, which adds the state that a lease keeps alive.
  Lease acquire(int32_t number, plan::Range range, Access access, Medium at);
  Lease scratch(int64_t numel, at::ScalarType type, Medium at, int32_t user);
  void release(Lease& lease) noexcept;

 private:
  // A copy of these blocks with the contents that the access needs.
  StagingPtr copy_of(StorageLock::Held& lock, Plane& plane, plan::Range range, const Lease& lease, Medium at);
  void write_back(const PlanePtr& plane, const StagingPtr& copy, const FencePtr& fence);

  StorageLock& lock_;
  MemoryAccounts& memory_;
  PlaneTable& planes_;
  BlockCopies& copies_;
  Prefetches& prefetches_;
  BackgroundTransfers& background_;
};

}  // namespace ds::storage
