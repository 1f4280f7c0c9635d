#include "zero/gathers/gather_buffers.h"

#include <utility>

namespace ds::zero {

using storage::Medium;

GatherBuffers::GatherBuffers(std::shared_ptr<storage::ShardStorage> storage) {
  if (storage) use(std::move(storage));
}

void GatherBuffers::use(std::shared_ptr<storage::ShardStorage> storage) {
  storage_ = std::move(storage);
  kept_ = storage_->add_scratch_user();
  passing_ = storage_->add_scratch_user(storage::Reuse::kNone);
  storage_->keep_scratch(Medium::kDevice, limit_, kept_);
}

void GatherBuffers::need(c10::Device device) {
  if (!storage_ || storage_->device() != device) use(std::make_shared<storage::ShardStorage>(device));
}

at::Tensor GatherBuffers::take(int64_t numel, at::ScalarType type, c10::Device device) {
  need(device);
  limit_ = std::max(limit_, 2 * numel * static_cast<int64_t>(c10::elementSize(type)));
  return storage::as_tensor(storage_->scratch(numel, type, Medium::kDevice, kept_));
}

at::Tensor GatherBuffers::take_passing(int64_t bytes, c10::Device device) {
  need(device);
  return storage::as_tensor(storage_->scratch(bytes, at::kByte, Medium::kDevice, bytes <= limit_ ? kept_ : passing_));
}

void GatherBuffers::keep_two_of(int64_t bytes) {
  limit_ = std::max(limit_, 2 * bytes);
  if (storage_) storage_->keep_scratch(Medium::kDevice, limit_, kept_);
}

void GatherBuffers::trim() {
  if (storage_) storage_->trim(kept_);
}

int64_t GatherBuffers::idle_bytes() const {
  return storage_ ? storage_->scratch_usage(Medium::kDevice, kept_).idle : 0;
}

}  // namespace ds::zero
