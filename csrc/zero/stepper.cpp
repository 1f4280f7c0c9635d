#include "zero/stepper.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <set>

#include "base/error.h"

namespace ds::zero {

Stepper::Stepper(ParamStore& store, DeviceContext& device)
    : store_(store), device_(device), steps_(at::zeros({static_cast<int64_t>(store.size())}, at::kFloat)) {}

template <typename Keep>
std::vector<Stepper::Run> Stepper::runs(const FlatSpace& space, const GradReducer& grads, Keep keep) const {
  std::vector<Run> result;
  bool open = false;
  for (size_t i = 0; i < space.params.size(); ++i) {
    const auto param = static_cast<size_t>(space.params[i]);
    const bool take = grads.used(param) && keep(param);
    const int64_t begin = space.layout.offsets[i], end = begin + space.layout.numels[i];
    if (take && open) {
      result.back().end = end;
    } else if (take) {
      result.push_back({begin, end});
    }
    open = take;
  }
  return result;
}

void Stepper::norm(const GradReducer& grads, float loss_scale, float max_norm, bool check,
                   comm::Communicator* model_parallel) {
  at::NoGradGuard no_grad;
  const c10::DeviceGuard current(device_.device());
  device_.sum_tensor().zero_();
  for (const FlatSpace& space : store_.spaces()) {
    const auto parts = runs(space, grads, [&](size_t param) { return store_.spec(param).counts_in_norm; });
    if (!has_kernel_dtype(space.grad.scalar_type())) {
      for (const Run& run : parts)
        device_.sum_tensor().add_(space.grad.narrow(0, run.begin, run.end - run.begin).square().sum());
      continue;
    }
    std::vector<kernels::Segment> segments;
    auto* base = static_cast<char*>(space.grad.data_ptr());
    for (const Run& run : parts)
      segments.push_back({base + run.begin * space.grad.element_size(), static_cast<size_t>(run.end - run.begin)});
    device_.table().sum_squares(device_.launch(), segments.data(), segments.size(),
                                kernel_dtype(space.grad.scalar_type(), "gradient"), device_.sum());
  }
  if (model_parallel) model_parallel->all_reduce(device_.sum_tensor(), comm::ReduceOp::kSum)->wait();
  device_.table().finish_norm(device_.launch(), device_.sum(), loss_scale, max_norm, check, device_.step_scale());
  device_.post_step_scale();
  stepped_.clear();
}

void Stepper::adam(const GradReducer& grads, int32_t group, const AdamGroupArgs& args) {
  at::NoGradGuard no_grad;
  const c10::DeviceGuard current(device_.device());
  ensure_slots(2);
  float* steps = steps_.data_ptr<float>();
  for (FlatSpace& space : store_.spaces()) {
    if (space.group != group) continue;
    const bool narrow = !space.lp.is_same(space.master);
    kernels::AdamArgs kernel_args{args.lr,
                                  args.beta1,
                                  args.beta2,
                                  args.eps,
                                  args.weight_decay,
                                  1.0,
                                  1.0,
                                  args.adamw,
                                  kernel_dtype(space.grad.scalar_type(), "gradient"),
                                  kernel_dtype(space.lp.scalar_type(), "parameter")};
    // Parameters that were unused in some steps have seen fewer updates, and bias correction depends on the number.
    std::set<float> counts;
    for (int32_t param : space.params)
      if (grads.used(param)) counts.insert(steps[param]);
    for (float count : counts) {
      const auto parts = runs(space, grads, [&](size_t param) { return steps[param] == count; });
      std::vector<kernels::AdamSegment> segments;
      for (const Run& run : parts) {
        kernels::AdamSegment segment;
        segment.master = space.master.data_ptr<float>() + run.begin;
        segment.exp_avg = space.slots[0].data_ptr<float>() + run.begin;
        segment.exp_avg_sq = space.slots[1].data_ptr<float>() + run.begin;
        segment.grad = static_cast<char*>(space.grad.data_ptr()) + run.begin * space.grad.element_size();
        segment.lp = narrow ? static_cast<char*>(space.lp.data_ptr()) + run.begin * space.lp.element_size() : nullptr;
        segment.numel = static_cast<size_t>(run.end - run.begin);
        segments.push_back(segment);
      }
      const double step = count + 1.0;
      if (args.bias_correction) {
        kernel_args.bias_correction1 = 1.0 - std::pow(args.beta1, step);
        kernel_args.bias_correction2 = 1.0 - std::pow(args.beta2, step);
      }
      device_.table().adam(device_.launch(), segments.data(), segments.size(), kernel_args, device_.step_scale());
    }
    for (int32_t param : space.params) {
      if (!grads.used(param)) continue;
      steps[param] += 1.0f;
      stepped_.push_back(param);
    }
  }
}

StepReport Stepper::report() {
  const kernels::StepScale scale = device_.read_step_scale();
  if (scale.skip) {
    float* steps = steps_.data_ptr<float>();
    for (int32_t param : stepped_) steps[param] -= 1.0f;
  }
  stepped_.clear();
  device_.check();
  return {scale.norm, scale.grad_scale, scale.skip != 0};
}

void Stepper::scale_grads(const GradReducer& grads) {
  at::NoGradGuard no_grad;
  const float scale = device_.read_step_scale().grad_scale;
  if (scale == 1.0f) return;
  for (const FlatSpace& space : store_.spaces()) {
    for (const Run& run : runs(space, grads, [](size_t) { return true; })) {
      const at::Tensor part = space.grad.narrow(0, run.begin, run.end - run.begin);
      device_.copy(part, part, scale);
    }
  }
}

void Stepper::publish() {
  at::NoGradGuard no_grad;
  for (FlatSpace& space : store_.spaces())
    if (!space.lp.is_same(space.master)) device_.copy(space.lp, space.master, 1.0f);
}

void Stepper::refresh_master() {
  at::NoGradGuard no_grad;
  for (FlatSpace& space : store_.spaces())
    if (!space.lp.is_same(space.master)) device_.copy(space.master, space.lp, 1.0f);
}

void Stepper::ensure_slots(int count) {
  for (FlatSpace& space : store_.spaces())
    while (static_cast<int>(space.slots.size()) < count)
      space.slots.push_back(at::zeros({space.layout.total_numel}, space.master.options().dtype(at::kFloat)));
}

at::Tensor Stepper::slot_view(size_t param, int slot) const {
  return store_.view(param, store_.spaces()[store_.place(param).space].slots.at(slot));
}

}  // namespace ds::zero
