#include "zero/stepper.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <set>

#include "base/error.h"

namespace ds::zero {

Stepper::Stepper(ParamStore& store, DeviceContext& device, comm::CommunicatorPtr data_parallel, GatherOptions gather)
    : store_(store),
      device_(device),
      data_parallel_(std::move(data_parallel)),
      gather_(gather),
      steps_(at::zeros({static_cast<int64_t>(store.size())}, at::kFloat)) {}

template <typename Keep>
std::vector<Stepper::Run> Stepper::runs(const FlatSpace& space, const GradReducer& grads, Keep keep) const {
  std::vector<Run> result;
  bool open = false;
  for (size_t e : space.owned) {
    const plan::Extent& extent = space.map.extents[e];
    const auto param = static_cast<size_t>(space.params[extent.param]);
    const bool take = grads.used(param) && keep(param);
    const int32_t bucket = space.map.bucket_of[extent.param];
    const int64_t begin = extent.shard_offset, end = begin + extent.numel;
    if (take && open && result.back().bucket == bucket) {
      result.back().end = end;
    } else if (take) {
      result.push_back({bucket, begin, end});
    }
    open = take;
  }
  return result;
}

char* Stepper::at(const FlatSpace& space, const Buffer& buffer, const Run& run) {
  const int64_t offset = space.offset_in(buffer, space.map.buckets[run.bucket], run.begin);
  return static_cast<char*>(buffer.data.data_ptr()) + offset * static_cast<int64_t>(buffer.data.element_size());
}

void Stepper::norm(const GradReducer& grads, float loss_scale, float max_norm, bool check,
                   comm::Communicator* model_parallel) {
  at::NoGradGuard no_grad;
  const c10::DeviceGuard current(device_.device());
  device_.sum_tensor().zero_();
  for (const FlatSpace& space : store_.spaces()) {
    const auto parts = runs(space, grads, [&](size_t param) { return store_.spec(param).counts_in_norm; });
    const at::Tensor& grad = space.grad.data;
    if (!has_kernel_dtype(grad.scalar_type())) {
      for (const Run& run : parts) {
        const int64_t begin = space.offset_in(space.grad, space.map.buckets[run.bucket], run.begin);
        device_.sum_tensor().add_(grad.narrow(0, begin, run.end - run.begin).square().sum());
      }
      continue;
    }
    std::vector<kernels::Segment> segments;
    for (const Run& run : parts)
      segments.push_back({at(space, space.grad, run), static_cast<size_t>(run.end - run.begin)});
    device_.table().sum_squares(device_.launch(), segments.data(), segments.size(),
                                kernel_dtype(grad.scalar_type(), "gradient"), device_.sum());
  }
  if (store_.sharded()) data_parallel_->all_reduce(device_.sum_tensor(), comm::ReduceOp::kSum)->wait();
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
    const bool narrow = space.narrow();
    kernels::AdamArgs kernel_args{args.lr,
                                  args.beta1,
                                  args.beta2,
                                  args.eps,
                                  args.weight_decay,
                                  1.0,
                                  1.0,
                                  args.adamw,
                                  kernel_dtype(space.grad.data.scalar_type(), "gradient"),
                                  kernel_dtype(space.lp.data.scalar_type(), "parameter")};
    // Parameters that were unused in some steps have seen fewer updates, and bias correction depends on the number.
    std::set<float> counts;
    for (int32_t param : space.params)
      if (grads.used(param)) counts.insert(steps[param]);
    const auto update = [&](auto in_pass) {
      for (float count : counts) {
        const auto parts = runs(space, grads, [&](size_t param) { return steps[param] == count; });
        std::vector<kernels::AdamSegment> segments;
        for (const Run& run : parts) {
          if (!in_pass(run.bucket)) continue;
          kernels::AdamSegment segment;
          segment.master = reinterpret_cast<float*>(at(space, space.master, run));
          segment.exp_avg = reinterpret_cast<float*>(at(space, space.slots[0], run));
          segment.exp_avg_sq = reinterpret_cast<float*>(at(space, space.slots[1], run));
          segment.grad = at(space, space.grad, run);
          segment.lp = narrow ? at(space, space.lp, run) : nullptr;
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
    };
    if (gathers(space) && gather_.overlap) {
      // From the first parameters on: the next forward wants them first.
      for (auto b = static_cast<int32_t>(space.map.buckets.size()) - 1; b >= 0; --b) {
        update([b](int32_t bucket) { return bucket == b; });
        start_gather(space, space.map.buckets[b]);
      }
    } else {
      update([](int32_t) { return true; });
      if (gathers(space))
        for (auto bucket = space.map.buckets.rbegin(); bucket != space.map.buckets.rend(); ++bucket)
          start_gather(space, *bucket);
    }
    for (int32_t param : space.params) {
      if (!grads.used(param)) continue;
      steps[param] += 1.0f;
      stepped_.push_back(param);
    }
  }
}

void Stepper::start_gather(FlatSpace& space, const plan::Bucket& bucket) {
  const int64_t row = bucket.shard_end - bucket.shard_begin;
  const at::Tensor all = space.lp.data.narrow(0, space.map.full_begin(bucket), space.map.parts * row);
  if (gather_.collective) {
    gathers_.push_back(data_parallel_->all_gather(all.narrow(0, space.rank * row, row), all));
    return;
  }
  for (int64_t rank = 0; rank < space.map.parts; ++rank)
    gathers_.push_back(data_parallel_->broadcast(all.narrow(0, rank * row, row), static_cast<int>(rank)));
}

void Stepper::finish_gather() {
  for (const comm::WorkPtr& work : gathers_) work->wait();
  gathers_.clear();
}

StepReport Stepper::report() {
  finish_gather();
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
      const int64_t begin = space.offset_in(space.grad, space.map.buckets[run.bucket], run.begin);
      const at::Tensor part = space.grad.data.narrow(0, begin, run.end - run.begin);
      device_.copy(part, part, scale);
    }
  }
}

void Stepper::publish() {
  at::NoGradGuard no_grad;
  for (FlatSpace& space : store_.spaces()) {
    for (auto bucket = space.map.buckets.rbegin(); bucket != space.map.buckets.rend(); ++bucket) {
      const int64_t row = bucket->shard_end - bucket->shard_begin;
      const auto part = [&](const Buffer& buffer) {
        return buffer.data.narrow(0, space.offset_in(buffer, *bucket, bucket->shard_begin), row);
      };
      if (space.narrow()) device_.copy(part(space.lp), part(space.master), 1.0f);
      if (gathers(space)) start_gather(space, *bucket);
    }
  }
  finish_gather();
}

void Stepper::refresh_master() {
  at::NoGradGuard no_grad;
  for (FlatSpace& space : store_.spaces()) {
    if (!space.narrow()) continue;
    for (const plan::Bucket& bucket : space.map.buckets) {
      const int64_t row = bucket.shard_end - bucket.shard_begin;
      const auto part = [&](const Buffer& buffer) {
        return buffer.data.narrow(0, space.offset_in(buffer, bucket, bucket.shard_begin), row);
      };
      device_.copy(part(space.master), part(space.lp), 1.0f);
    }
  }
}

void Stepper::ensure_slots(int count) {
  for (FlatSpace& space : store_.spaces())
    while (static_cast<int>(space.slots.size()) < count)
      space.slots.push_back({at::zeros({space.map.shard_numel}, space.master.data.options().dtype(at::kFloat)),
                             space.map.parts == 1 && space.grad.full});
}

}  // namespace ds::zero
