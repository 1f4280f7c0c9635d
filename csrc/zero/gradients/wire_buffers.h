// Scratch memory of the gradients' way over the wire: slots, wire and receive buffers of buckets.
//
// [Note: idle wire buffers]
// The next backward needs the same memory again, so what comes back is kept. Buckets differ in size, and a buffer of
// each size would be as much memory as all gradients: a buffer serves all requests that are not larger
// (storage::Reuse::kAnySize). There are as many buffers as were borrowed at one time, each at most as large as the
// largest request.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "storage/shard_storage.h"

namespace ds::zero {

class WireBuffers {
 public:
  explicit WireBuffers(storage::ShardStorage& storage)
      : storage_(storage), user_(storage.add_scratch_user(storage::Reuse::kAnySize)) {}

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
