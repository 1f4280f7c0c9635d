#include "zero/accumulator_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

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

}  // namespace

void AccumulatorHooks::add(const at::Tensor& param, std::function<void()> fired) {
  auto accumulator = torch::autograd::impl::grad_accumulator(param);
  const auto key = accumulator->add_post_hook(std::make_unique<FiredHook>(std::move(fired)));
  hooks_.emplace_back(std::move(accumulator), key);
}

void AccumulatorHooks::clear() {
  for (auto& [accumulator, key] : hooks_) accumulator->del_post_hook(key);
  hooks_.clear();
}

}  // namespace ds::zero
