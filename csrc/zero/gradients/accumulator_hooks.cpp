#include "zero/gradients/accumulator_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "base/ranges.h"

namespace ds::zero {

namespace {

class FiredHook : public torch::autograd::FunctionPostHook {
 public:
  explicit FiredHook(std::function<void()> fired) : fired_(std::move(fired)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    fired_();
    return outputs;
  }

 private:
  std::function<void()> fired_;
};

// Autograd would copy the gradient into the shape that a released parameter has, which is none.
class ReleasedHook : public torch::autograd::FunctionPreHook {
 public:
  explicit ReleasedHook(at::Tensor param) : param_(std::move(param)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    const at::Tensor& grad = grads.at(0);
    if (!grad.defined() || grad.sizes() == param_.sizes()) return grads;
    param_.mutable_grad() = grad.detach();
    return {at::Tensor()};
  }

 private:
  at::Tensor param_;
};

}  // namespace

int64_t AccumulatorHooks::add(const at::Tensor& param, std::function<void()> fired, bool comes_and_goes) {
  Hooked hooked;
  hooked.accumulator = torch::autograd::impl::grad_accumulator(param);
  hooked.fired = hooked.accumulator->add_post_hook(std::make_unique<FiredHook>(std::move(fired)));
  if (comes_and_goes) {
    auto released = std::make_unique<ReleasedHook>(param);
    hooked.released = released.get();
    hooked.accumulator->add_pre_hook(std::move(released));
  }
  hooks_.push_back(std::move(hooked));
  return static_cast<int64_t>(hooks_.size()) - 1;
}

bool AccumulatorHooks::lost(int64_t number, const at::Tensor& param) const {
  return torch::autograd::impl::try_get_grad_accumulator(param) != hooks_.at(static_cast<size_t>(number)).accumulator;
}

void AccumulatorHooks::clear() {
  for (Hooked& hooked : hooks_) {
    hooked.accumulator->del_post_hook(hooked.fired);
    auto& before = hooked.accumulator->pre_hooks();
    const auto is_ours = [&](const auto& hook) { return hook.get() == hooked.released; };
    if (hooked.released) erase_if(before, is_ours);
  }
  hooks_.clear();
}

}  // namespace ds::zero
