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
class EnteringHook : public torch::autograd::FunctionPreHook {
 public:
  EnteringHook(AccumulatorHooks::Entering entering, at::Tensor released)
      : entering_(std::move(entering)), released_(std::move(released)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (!grads.at(0).defined()) return grads;
    at::Tensor grad = entering_(grads[0]);
    if (!released_.defined() || grad.sizes() == released_.sizes()) return {std::move(grad)};
    released_.mutable_grad() = grad.detach();
    return {at::Tensor()};
  }

 private:
  const AccumulatorHooks::Entering entering_;
  at::Tensor released_;  // a parameter whose data may be away; else undefined
};

}  // namespace

int64_t AccumulatorHooks::add(const at::Tensor& param, Entering entering, std::function<void()> fired,
                              bool comes_and_goes) {
  Hooked hooked;
  hooked.accumulator = torch::autograd::impl::grad_accumulator(param);
  hooked.fired = hooked.accumulator->add_post_hook(std::make_unique<FiredHook>(std::move(fired)));
  auto before = std::make_unique<EnteringHook>(std::move(entering), comes_and_goes ? param : at::Tensor());
  hooked.entering = before.get();
  hooked.accumulator->add_pre_hook(std::move(before));
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
    const auto is_ours = [&](const auto& hook) { return hook.get() == hooked.entering; };
    erase_if(before, is_ours);
  }
  hooks_.clear();
}

}  // namespace ds::zero
