#include "zero/gradients/micro_steps.h"

#include <algorithm>

namespace ds::zero {

int64_t MicroSteps::add_forward(bool seen) {
  micro_.unknown = micro_.unknown || !seen;
  ++micro_.forwards;
  return ++number_;
}

void MicroSteps::add_backward(bool own) {
  micro_.own = micro_.own || own;
  ++micro_.backwards;
}

void MicroSteps::reach(int64_t forward) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reaching_.insert(forward);
}

void MicroSteps::keep_reached() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reached_.insert(reaching_.begin(), reaching_.end());
  reaching_.clear();
}

void MicroSteps::drop_reached() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reaching_.clear();
}

void MicroSteps::end(bool boundary, int64_t count) {
  earlier_ = boundary ? 0 : micro_batches();
  total_ += count;
  if (boundary) begin_ = total_;
  micro_ = {};
  const std::lock_guard<std::mutex> lock(mutex_);
  reached_.clear();
}

void MicroSteps::restart() {
  total_ = begin_;
  earlier_ = 0;
  micro_ = {};
  const std::lock_guard<std::mutex> lock(mutex_);
  reached_.clear();
  reaching_.clear();
}

void MicroSteps::set_total(int64_t total) {
  begin_ += total - total_;
  total_ = total;
}

std::vector<int64_t> MicroSteps::reached() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {reached_.begin(), reached_.end()};
}

int64_t MicroSteps::micro_batches() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = static_cast<int64_t>(reached_.size());
  return earlier_ + std::max<int64_t>(known, micro_.own || micro_.unknown ? 1 : 0);
}

int64_t MicroSteps::trained() const { return std::max(index(), micro_batches()); }

}  // namespace ds::zero
