#include "zero/stepper.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
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
std::vector<Stepper::Run> Stepper::runs(const FlatSpace& space, const GradReducer& grads, Keep keep, bool apart) const {
  std::vector<Run> result;
  bool open = false;
  for (size_t e : space.owned) {
    const plan::Extent& extent = space.map.extents[e];
    const auto param = static_cast<size_t>(space.params[extent.param]);
    const bool take = grads.used(param) && keep(param);
    const int32_t bucket = space.map.bucket_of[extent.param];
    const int64_t begin = extent.shard_offset, end = begin + extent.numel;
    if (take && open && !apart && result.back().bucket == bucket) {
      result.back().end = end;
    } else if (take) {
      result.push_back({bucket, begin, end, extent.param});
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

void Stepper::set_rules(std::vector<const optim::Rule*> by_group) {
  for (const optim::Rule* rule : by_group)
    if (rule->packed)
      fail(ErrorKind::kValue, "the optimizer '", rule->name, "' keeps its states packed and cannot be cut into shards");
  rules_ = std::move(by_group);
  slot_names_.clear();
  for (const optim::Rule* rule : rules_)
    for (const std::string& name : rule->slots)
      if (std::find(slot_names_.begin(), slot_names_.end(), name) == slot_names_.end()) slot_names_.push_back(name);
  for (FlatSpace& space : store_.spaces()) space.slots.clear();
}

void Stepper::update(const GradReducer& grads, int32_t group, const std::vector<double>& hyper) {
  at::NoGradGuard no_grad;
  const c10::DeviceGuard current(device_.device());
  const optim::Rule& rule = *rules_.at(group);
  for (FlatSpace& space : store_.spaces())
    if (space.group == group) update_space(space, grads, rule, hyper);
}

void Stepper::update_space(FlatSpace& space, const GradReducer& grads, const optim::Rule& rule,
                           const std::vector<double>& hyper) {
  ensure_slots(space);
  const bool narrow = space.narrow();
  kernels::UpdateArgs args;
  args.grad_dtype = kernel_dtype(space.grad.data.scalar_type(), "gradient");
  args.lp_dtype = kernel_dtype(space.lp.data.scalar_type(), "parameter");
  at::Tensor sums, scratch;
  if (rule.sums > 0)
    sums = at::zeros({static_cast<int64_t>(space.params.size()), rule.sums},
                     space.master.data.options().dtype(at::kDouble));
  const Buffer* like = space.slots.empty() ? nullptr : &space.slots[0];
  Buffer scratch_buffer;
  if (rule.scratch && like != nullptr) scratch_buffer = {at::empty_like(like->data), like->full};

  // Parameters that were unused in some steps have seen fewer updates, and bias correction depends on the number.
  float* steps = steps_.data_ptr<float>();
  std::set<float> counts;
  for (int32_t param : space.params)
    if (grads.used(param)) counts.insert(steps[param]);
  const auto run = [&](size_t pass, auto in_turn) {
    for (float count : counts) {
      const auto parts = runs(
          space, grads, [&](size_t param) { return steps[param] == count; }, rule.by_parameter());
      std::vector<kernels::UpdateSegment> segments;
      for (const Run& part : parts) {
        if (!in_turn(part.bucket)) continue;
        kernels::UpdateSegment segment;
        segment.master = at(space, space.master, part);
        for (size_t slot = 0; slot < rule.slots.size(); ++slot)
          segment.states[slot] = at(space, space.slots[slot], part);
        segment.grad = at(space, space.grad, part);
        segment.lp = narrow ? at(space, space.lp, part) : nullptr;
        segment.numel = static_cast<size_t>(part.end - part.begin);
        if (scratch_buffer.data.defined()) segment.scratch = reinterpret_cast<float*>(at(space, scratch_buffer, part));
        if (rule.sums > 0) segment.sums = sums.data_ptr<double>() + part.index * rule.sums;
        segments.push_back(segment);
      }
      optim::run_pass(device_.table(), device_.launch(), rule, pass, segments, args, hyper, count + 1.0,
                      device_.step_scale());
    }
  };
  const auto all = [](int32_t) { return true; };
  const size_t last = rule.passes.size() - 1;
  for (size_t pass = 0; pass < last; ++pass) {
    run(pass, all);
    if (rule.passes[pass].adds_sums && store_.sharded()) data_parallel_->all_reduce(sums, comm::ReduceOp::kSum)->wait();
  }
  if (gathers(space) && gather_.overlap) {
    // From the first parameters on: the next forward wants them first.
    for (auto b = static_cast<int32_t>(space.map.buckets.size()) - 1; b >= 0; --b) {
      run(last, [b](int32_t bucket) { return bucket == b; });
      start_gather(space, space.map.buckets[b]);
    }
  } else {
    run(last, all);
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

void Stepper::ensure_slots(FlatSpace& space) {
  const size_t wanted = rules_.empty() ? 0 : rules_.at(space.group)->slots.size();
  while (space.slots.size() < wanted)
    space.slots.push_back({at::zeros({space.map.shard_numel}, space.master.data.options().dtype(at::kFloat)),
                           space.map.parts == 1 && space.grad.full});
}

const Buffer* Stepper::slot(FlatSpace& space, int slot) {
  if (slot < 0 || slot >= static_cast<int>(slot_names_.size()))
    fail(ErrorKind::kIndex, "there is no optimizer slot ", slot, ": there are ", slot_names_.size());
  const std::vector<std::string>& own = rules_.at(space.group)->slots;
  const auto found = std::find(own.begin(), own.end(), slot_names_[slot]);
  if (found == own.end()) return nullptr;
  ensure_slots(space);
  return &space.slots[found - own.begin()];
}

}  // namespace ds::zero
