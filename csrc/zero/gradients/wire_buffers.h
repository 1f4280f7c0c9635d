// Scratch memory of the gradients' way over the wire: slots, wire and receive buffers of buckets.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "storage/shard_storage.h"

namespace ds::zero {

class WireBuffers {
 public:
  explicit WireBuffers(storage::ShardStorage& storage) : storage_(storage), user_(storage.add_scratch_user()) {
    // The next backward needs the same memory again.
    storage_.keep_scratch(storage::Medium::kDevice, INT64_MAX, user_);
  }

  // Comes back when nobody refers to its memory.
  at::Tensor borrow(int64_t numel, at::ScalarType type) {
    return storage::as_tensor(storage_.scratch(numel, type, storage::Medium::kDevice, user_));
  }
  void clear() { storage_.trim(user_); }
  int64_t bytes() const {
    const storage::ScratchUsage used = storage_.scratch_usage(storage::Medium::kDevice, user_);
    return used.lent + used.idle;
  }
  int64_t peak_bytes() const { return storage_.scratch_usage(storage::Medium::kDevice, user_).peak; }

 private:
  storage::ShardStorage& storage_;
  const storage::ScratchUser user_;
};

}  // namespace ds::zero
