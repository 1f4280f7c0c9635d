// The planes of a storage by number: readers and writers of their blocks, and the parts of tiers in which they rest.
#pragma once
#include <string>
#include <vector>

#include "storage/memory_accounts.h"

namespace ds::storage {

// All functions are called with the lock; those that get it may release it in between.
class PlaneTable {
 public:
  PlaneTable(StorageLock& lock, MemoryAccounts& memory, const Tiers& tiers)
      : lock_(lock), memory_(memory), tiers_(tiers) {}

  // Throws ErrorKind::kIndex where there is no such plane (any more) or no such range of it.
  PlanePtr find(int32_t number) const;
  PlanePtr find(int32_t number, plan::Range range, Medium at) const;
  const std::vector<PlanePtr>& all() const { return planes_; }  // null: removed
  // As in ShardStorage. The caller has not taken the lock.
  int32_t add(std::string name, int64_t numel, at::ScalarType type, const Placement& placement, const Cuts& cuts,
              const PlaneExtras& extras);
  // Nobody reads or writes it.
  void remove(int32_t number);
  at::Tensor resident(StorageLock::Held& lock, int32_t number, plan::Range range);
  // Blocks [first, end) that have no memory get some. Returns whether there were any.
  bool open_absent(StorageLock::Held& lock, Plane& plane, int32_t first, int32_t end, bool zero);
  // The memory of a block of a plane whose blocks lie apart goes. Nobody reads or writes it.
  void close_block(Plane& plane, int32_t block);

  // `alone`: as a writer; else as one of several readers. Throws where the plane is removed meanwhile.
  void wait_for_blocks(StorageLock::Held& lock, const Plane& plane, int32_t first, int32_t end, bool alone);
  static void mark(Plane& plane, int32_t first, int32_t end, bool alone);
  void unmark(Plane& plane, int32_t first, int32_t end, bool alone);
  // Others wait for what has been launched on the current stream with the memory in which these blocks rest.
  void add_fence(Plane& plane, int32_t first, int32_t end) noexcept;
  // The current stream waits for earlier work of other streams on these blocks.
  void wait_for_streams(const Plane& plane, int32_t first, int32_t end) const;

  void open_parts(StorageLock::Held& lock, Plane& plane, const Placement& placement, std::vector<PlanePart>& parts);
  void close_parts(Plane& plane, std::vector<PlanePart>& parts);

  // Takes the oldest prefetched copy in a medium, of a user (-1: any), out of its plane. Null: there is none.
  StagingPtr take_oldest_prefetched(Medium medium, int32_t user) const;

 private:
  StorageLock& lock_;
  MemoryAccounts& memory_;
  const Tiers& tiers_;
  std::vector<PlanePtr> planes_;
};

}  // namespace ds::storage
