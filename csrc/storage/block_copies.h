// Bytes of blocks, to and from copies in memory. All functions are called without the lock.
#pragma once
#include "storage/memory_accounts.h"

namespace ds::storage {

class BlockCopies {
 public:
  BlockCopies(StorageLock& lock, MemoryAccounts& memory, c10::Device device)
      : lock_(lock), memory_(memory), device_(device) {}

  // One block, from its part to its offset in the copy, or back. Usage counts the bytes and the time.
  void fetch(const Plane& plane, int32_t block, const Staging& copy, bool in_background) {
    transfer(plane, plane.part_of(block), block, copy, /*fetch=*/true, in_background);
  }
  void write_back(const Plane& plane, int32_t block, const Staging& copy) {
    transfer(plane, plane.part_of(block), block, copy, /*fetch=*/false, /*in_background=*/true);
  }
  // The whole plane into parts of another placement. `wait_each`: the host waits for each copy of a device.
  void copy_plane(const Plane& plane, const std::vector<PlanePart>& to, bool wait_each);

 private:
  class HostCopy;

  void transfer(const Plane& plane, const PlanePart& part, int32_t block, const Staging& copy, bool fetch,
                bool in_background);
  void transfer_block(const Plane& plane, const PlanePart& part, int32_t block, const Staging& copy, bool fetch,
                      bool in_background);

  StorageLock& lock_;
  MemoryAccounts& memory_;
  const c10::Device device_;
};

}  // namespace ds::storage
