// Memory of gathered parameters: scratch leases of the engine's storage, counted by its usage(). A buffer comes back
// when nobody refers to its memory any more, a view that autograd has saved included.
//
// [Note: idle memory]
// Memory for the two largest units: one is in use, one on its way. What comes back beyond that returns to torch's
// allocator, so that gathering a whole model once leaves no whole model behind.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "storage/shard_storage.h"

namespace ds::zero {

class GatherBuffers {
 public:
  // Null: a storage of its own on the device of the first buffer, since while a model is being built there is no
  // engine.
  explicit GatherBuffers(std::shared_ptr<storage::ShardStorage> storage = nullptr);

  at::Tensor take(int64_t numel, at::ScalarType type, c10::Device device);
  // A temporary buffer; it is freed if it is larger than the retained pool.
  at::Tensor take_passing(int64_t bytes, c10::Device device);

  void keep_two_of(int64_t bytes);
  void trim();
  int64_t idle_bytes() const;
  c10::Device device() const { return storage_->device(); }  // only with a storage

 private:
  void need(c10::Device device);
  void use(std::shared_ptr<storage::ShardStorage> storage);

  std::shared_ptr<storage::ShardStorage> storage_;
  storage::ScratchUser kept_, passing_;
  int64_t limit_ = 0;
};

}  // namespace ds::zero
