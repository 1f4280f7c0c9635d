// Scratch memory of the gradients' way over the wire: slots, wire and receive buffers of buckets.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "storage/shard_storage.h"

namespace ds::zero {

class WireBuffers {
 public:
  explicit WireBuffers(c10::Device device) : storage_(device) {
    // What was lent at one time is wanted again in the next backward.
    storage_.keep_scratch(storage::Medium::kDevice, INT64_MAX);
  }

  // Comes back when nobody refers to its memory.
  at::Tensor borrow(int64_t numel, at::ScalarType type) {
    return storage::as_tensor(storage_.scratch(numel, type, storage::Medium::kDevice));
  }
  void clear() { storage_.trim(); }
  int64_t peak_bytes() const { return storage_.usage()[0].peak_scratch; }

 private:
  storage::ShardStorage storage_;
};

}  // namespace ds::zero
