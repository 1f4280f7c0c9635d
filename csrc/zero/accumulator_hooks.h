// C++ hooks that run right after autograd has accumulated into a parameter's .grad, without the GIL.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <vector>

namespace ds::zero {

class AccumulatorHooks {
 public:
  AccumulatorHooks() = default;
  ~AccumulatorHooks() { clear(); }
  AccumulatorHooks(const AccumulatorHooks&) = delete;
  AccumulatorHooks& operator=(const AccumulatorHooks&) = delete;

  // `param` requires grad and has its full data: the accumulator remembers the shape. Keeps the accumulator alive,
  // without which the hook would vanish with the next graph.
  void add(const at::Tensor& param, std::function<void()> fired);
  void clear();

 private:
  std::vector<std::pair<std::shared_ptr<torch::autograd::Node>, uintptr_t>> hooks_;
};

}  // namespace ds::zero
