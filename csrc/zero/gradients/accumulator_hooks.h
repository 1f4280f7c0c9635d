// C++ hooks that run right before and right after autograd accumulates into a parameter's .grad, without the GIL.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>
#include <vector>

#include "comm/c10d_compat.h"

namespace ds::zero {

class AccumulatorHooks {
 public:
  AccumulatorHooks() = default;
  ~AccumulatorHooks() { clear(); }
  AccumulatorHooks(const AccumulatorHooks&) = delete;
  AccumulatorHooks& operator=(const AccumulatorHooks&) = delete;

  using Entering = std::function<at::Tensor(const at::Tensor&)>;

  // `param` requires grad and has its full data: the accumulator remembers the shape. Keeps the accumulator alive,
  // without which the hook would vanish with the next graph. `entering` gives what is accumulated for a gradient that
  // has arrived. `comes_and_goes`: the data may be away when a gradient arrives, as when a caller gathers the parameter
  // for the backward of a function of its own; .grad takes it as it is. The result: a number for lost().
  int64_t add(const at::Tensor& param, Entering entering, std::function<void()> fired, bool comes_and_goes = false);
  // The parameter has another accumulator than the one that was hooked: autograd forgets it when the data of a
  // parameter get another dtype or device.
  bool lost(int64_t number, const at::Tensor& param) const;
  // The node of autograd that was hooked.
  torch::autograd::Node* node(int64_t number) const {
    return hooks_.at(static_cast<size_t>(number)).accumulator.get();
  }
  void clear();

 private:
  struct Hooked {
    comm::compat::NodePtr accumulator;
    uintptr_t fired = 0;
    const torch::autograd::FunctionPreHook* entering = nullptr;
  };

  std::vector<Hooked> hooks_;
};

}  // namespace ds::zero
