#include "zero/step/stepper.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "kernels/sum_order.h"
#include "zero/step/matrix_step.h"

namespace ds::zero {

Stepper::Stepper(ParamStore& store, DeviceContext& device, GatherOptions gather)
    : store_(store),
      device_(device),
      memory_(store, device),
      gather_(store, gather),
      compressed_(store, device),
      sums_(store),
      steps_(at::zeros({static_cast<int64_t>(store.size())}, at::kFloat)),
      squares_(store, device.sum_tensor()) {}

// ---- norm ---------------------------------------------------------------------------------------------------------

// Allocates the memory of the step before the ranks agree that it can be made: states, and the scratch of all kernels.
void Stepper::prepare() {
  scratch_.assign(store_.spaces().size(), at::Tensor());
  for (size_t number = 0; number < store_.spaces().size(); ++number) {
    ParamSpace& space = store_.spaces()[number];
    ensure_slots(space);
    if (rules_.empty()) continue;
    const optim::Rule& rule = *rules_.at(space.key.param_group);
    if (rule.scratch && !rule.orthogonalises())
      scratch_[number] =
          at::empty({space.map.shard_numel}, at::TensorOptions().device(device_.device()).dtype(at::kFloat));
  }
  if (!device_.may_fail()) return;
  size_t blocks = 0;
  int64_t numel = 0;
  for (const ParamSpace& space : store_.spaces()) {
    for (size_t e : space.owned) blocks += kernels::sum_blocks(static_cast<size_t>(space.map.extents[e].numel)) + 1;
    numel += space.map.shard_numel;
  }
  device_.reserve(static_cast<int64_t>(blocks * kernels::kSumScratchBytes), numel);
}

// A rank that failed must not be the only one that knows, or the others would update with what it has sent them: that
// travels to the ranks with the same elements here, to all others with the norm.
void Stepper::share_failure() {
  const SpaceRanks& everyone = store_.everyone();
  const at::Tensor shared = device_.failures();
  if (device_.failed()) {
    shared.select(0, 0).fill_(1);
    shared.select(0, 1).fill_(everyone.rank() + 1);
  }
  if (device_.may_fail() && everyone.replicas->size() > 1)
    everyone.replicas->all_reduce(shared, comm::ReduceOp::kSum, "whether kernels have failed")->wait();
}

// Adds this rank's part of the space to `sum`.
void Stepper::sum_squares(const ParamSpace& space, const GradReducer& grads, const at::Tensor& sum) {
  const auto all = owned_runs(space, [&](size_t, size_t param) { return grads.used(param); });
  memory_.each_piece(space, space.grad, [&](int32_t bucket, storage::Medium at) {
    std::vector<UpdateRun> parts;
    for (const UpdateRun& run : all)
      if (bucket < 0 || run.bucket == bucket) parts.push_back(run);
    if (parts.empty()) return;
    const LeasedRow grad = memory_.lease(space, space.grad, bucket, storage::Access::kRead, at);
    const bool here = &memory_.context(at) == &device_;
    const at::Tensor total = here ? sum : at::zeros({1}, at::TensorOptions().dtype(at::kDouble));
    if (!has_kernel_dtype(space.grad.dtype)) {
      for (const UpdateRun& run : parts)
        total.select(0, 0).add_(grad.narrow(run.bucket, run.begin, run.end).square().sum());
    } else {
      std::vector<kernels::Segment> segments;
      for (const UpdateRun& run : parts)
        segments.push_back({grad.address(run.bucket, run.begin), static_cast<size_t>(run.end - run.begin)});
      DeviceContext& context = memory_.context(at);
      context.run_reserved([&](const kernels::Launch& launch) {
        context.table().sum_squares(launch, segments.data(), segments.size(),
                                    kernel_dtype(space.grad.dtype, "gradient"), static_cast<double*>(total.data_ptr()));
      });
    }
    if (!here) sum.add_(total.to(sum.device()));
  });
}

void Stepper::norm(const GradReducer& grads, float loss_scale, float max_norm, bool check) {
  at::NoGradGuard no_grad;
  const c10::DeviceGuard current(device_.device());
  try {
    prepare();
    squares_.clear();
    for (size_t space = 0; space < store_.spaces().size(); ++space)
      if (const at::Tensor sum = squares_.of(space); sum.defined()) sum_squares(store_.spaces()[space], grads, sum);
  } catch (const c10::Error& error) {
    if (!device_.may_fail()) throw;
    device_.note_failure(std::string("there is no memory for the optimizer: ") + error.what_without_backtrace());
  }
  share_failure();
  if (grads.local()) squares_.mean_over(*store_.everyone().replicas, "mean square of the ranks' gradients");
  squares_.add_up("gradient norm");
  device_.run([&](const kernels::Launch& launch) {
    device_.table().finish_norm(launch, device_.sum(), device_.sum() + 1, loss_scale, max_norm, check || grads.local(),
                                device_.step_scale());
  });
  device_.post_step_scale();
  memory_.share_step_scale();
  stepped_.clear();
}

void Stepper::set_rules(std::vector<const optim::Rule*> by_group) {
  for (const optim::Rule* rule : by_group)
    if (rule->packed)
      fail(ErrorKind::kValue, "the optimizer '", rule->name, "' keeps its states packed and cannot be cut into shards");
  for (const optim::Rule* rule : by_group) memory_.check_buffers(*rule);
  compressed_.set_rules(by_group, steps_);
  rules_ = std::move(by_group);
  sums_.set_rules(rules_);
  slot_names_.clear();
  for (const optim::Rule* rule : rules_)
    for (const std::string& name : rule->slots)
      if (!contains(slot_names_, name)) slot_names_.push_back(name);
  for (ParamSpace& space : store_.spaces()) {
    for (Buffer& slot : space.slots) store_.drop(slot);
    space.slots.clear();
  }
}

void Stepper::update(const GradReducer& grads, const std::vector<UpdatePart>& parts,
                     const std::vector<std::vector<double>>& hyper) {
  at::NoGradGuard no_grad;
  const c10::DeviceGuard current(device_.device());
  if (hyper.size() != rules_.size())
    fail(ErrorKind::kValue, "update: hyperparameters of ", hyper.size(), " groups for ", rules_.size());
  const auto in_parts = [&](const ParamSpace& space) {
    return any_of(parts,
                  [&](const UpdatePart& part) { return part.takes != nullptr && (!part.cuts || part.cuts(space)); });
  };
  const bool skip = grads.local() && device_.read_step_scale().skip;
  const GroupValues values =
      skip ? hyper : compressed_.begin(hyper, grads.local(), [&](size_t param) { return grads.used(param); });
  std::vector<Turn> turns;
  size_t passes = 0;
  for (ParamSpace& space : store_.spaces()) {
    if (!device_.failed()) ensure_slots(space);
    const optim::Rule& rule = *rules_.at(space.key.param_group);
    if ((rule.by_parameter() || rule.orthogonalises()) && in_parts(space))
      fail(ErrorKind::kValue, "the optimizer '", rule.name,
           "' looks at whole parameters and cannot update a part of them; the strategy of this step does so");
    const optim::Phase* const phase = compressed_.phase(space.key.param_group);
    const std::vector<optim::Pass>& own = phase ? phase->passes : rule.passes;
    turns.push_back({space, rule, own, values[space.key.param_group], parts, {}});
    passes = std::max(passes, own.size());
    turns.back().scratch.data = std::move(scratch_.at(turns.size() - 1));  // of prepare()
  }
  sums_.begin();
  const auto exchanged = [](const Turn& turn, size_t pass) { return pass > 0 && turn.passes[pass - 1].exchanges; };
  for (size_t pass = 0; pass + 1 < passes; ++pass) {
    for (const Turn& turn : turns) {
      if (skip || pass + 1 >= turn.passes.size() || turn.rule.orthogonalises() || exchanged(turn, pass)) continue;
      turn.passes[pass].exchanges ? exchange_passes(turn, grads, pass) : run_pass(turn, grads, pass);
    }
    const auto any = [&](auto member) {
      return any_of(turns,
                    [&](const Turn& turn) { return pass + 1 < turn.passes.size() && turn.passes[pass].*member; });
    };
    if (any(&optim::Pass::adds_sums)) sums_.add_up();
    if (any(&optim::Pass::evens_out)) compressed_.even_out(turns.front().rule, sums_.rows());
  }
  for (Turn& turn : turns) {
    if (turn.rule.orthogonalises()) {
      matrix_passes(turn, grads);
    } else if (!skip && !exchanged(turn, turn.passes.size() - 1)) {
      last_pass(turn, grads);
    }
  }
  if (!skip) compressed_.finish();
  count_steps(parts, grads);
}

// Adds a step to each part's own count; parts without one count a parameter once.
void Stepper::count_steps(const std::vector<UpdatePart>& parts, const GradReducer& grads) {
  std::vector<uint8_t> counted(store_.size());
  for (const UpdatePart& part : parts) {
    float* steps = (part.steps.defined() ? part.steps : steps_).data_ptr<float>();
    for (size_t param = 0; param < store_.size(); ++param) {
      if (part.used ? !part.used(param) : !grads.used(param)) continue;
      if (!part.steps.defined() && std::exchange(counted[param], 1)) continue;
      steps[param] += 1.0f;
      stepped_.push_back(steps + param);
    }
  }
}

// Where this rank has failed, perhaps without memory for states, it only takes part in what the ranks do together.
void Stepper::run_pass(const Turn& turn, const GradReducer& grads, size_t pass, int32_t bucket) {
  if (device_.failed()) return;
  for (const UpdatePart& part : turn.parts) run_pass(turn, part, grads, pass, bucket);
}

void Stepper::run_pass(const Turn& turn, const UpdatePart& part, const GradReducer& grads, size_t pass,
                       int32_t bucket) {
  ParamSpace& space = turn.space;
  const optim::Rule& rule = turn.rule;
  const Buffer& grad_buffer = part.grads ? part.grads(space) : space.grad;
  const storage::Medium medium = memory_.of_pass(space, rule, part.scale != nullptr, bucket);
  const bool view = memory_.hold_all(space, grad_buffer, bucket, medium);
  if (bucket < 0 && !view) {
    for (auto b = static_cast<int32_t>(space.map.buckets.size()) - 1; b >= 0; --b) run_pass(turn, part, grads, pass, b);
    return;
  }
  const auto used = [&](size_t param) { return part.used ? part.used(param) : grads.used(param); };
  UpdateChoice choice;
  choice.bucket = bucket;
  choice.used = used;
  choice.steps = (part.steps.defined() ? part.steps : steps_).data_ptr<float>();
  if (part.takes) choice.takes = [&](size_t extent) { return part.takes(space, extent); };
  choice.apart = rule.by_parameter();
  const RunsByCount by_count = runs_by_count(space, choice);
  if (by_count.empty()) return;
  DeviceContext& context = memory_.context(medium);
  const bool host_knows = medium != storage::Medium::kDevice || device_.device().is_cpu();
  if (!view && host_knows && context.read_step_scale().skip) return;

  const auto lease = [&](const Buffer& buffer, storage::Access access) {
    return memory_.lease(space, buffer, bucket, access, medium);
  };
  UpdateRows rows;
  rows.master = lease(space.master, storage::Access::kUpdate);
  rows.grad = lease(grad_buffer, storage::Access::kRead);
  for (size_t slot = 0; slot < rule.slots.size(); ++slot)
    rows.slots.push_back(lease(space.slots[slot], storage::Access::kUpdate));
  for (const Buffer& beside : compressed_.beside(space)) rows.slots.push_back(lease(beside, storage::Access::kUpdate));
  if (space.has_masters() && pass + 1 == turn.passes.size()) {
    // A row that is written from its beginning on, in one run, need not be fetched.
    const std::vector<UpdateRun>& first = by_count.begin()->second;
    const bool fills = !view && host_knows && by_count.size() == 1 && first.size() == 1 &&
                       first[0].begin == space.map.buckets[bucket].shard_begin &&
                       first[0].end == last_owned(space, bucket);
    rows.lp = lease(space.lp, fills ? storage::Access::kWrite : storage::Access::kUpdate);
    if (fills) rows.lp.narrow(bucket, first[0].end, space.map.buckets[bucket].shard_end).zero_();
  }
  // A prefetched copy that is not taken would be stale in a later step.
  const auto is_next = [&](size_t e) {
    const int32_t i = space.map.extents[e].param;
    return space.map.bucket_of[i] == bucket - 1 && used(space.params[i]) && (!part.takes || part.takes(space, e));
  };
  if (!view && bucket > 0 && any_of(space.owned, is_next))
    memory_.prefetch(space, grad_buffer, bucket - 1, memory_.of_pass(space, rule, part.scale != nullptr, bucket - 1));

  if (turn.scratch.data.defined()) rows.scratch = turn.scratch.data.data_ptr<float>();
  rows.origin = turn.scratch.origin;
  if (rule.sums > 0) rows.sums = sums_.rows().data_ptr<double>();
  if (rule.sums > 0) rows.sums_width = sums_.rows().size(1);
  update_runs(context, space, rule, turn.passes[pass], by_count, rows, turn.hyper,
              part.scale ? part.scale : context.step_scale());
}

void Stepper::last_pass(const Turn& turn, const GradReducer& grads) {
  ParamSpace& space = turn.space;
  const size_t last = turn.passes.size() - 1;
  if (space.gathers_after_step() && gather_.overlaps()) {
    // From the first parameters on: the next forward needs them first. If weights come back from another tier, their
    // bucket is gathered when the next one has been stepped, so that no gather waits for them.
    const int32_t lag = memory_.travel(space) ? 1 : 0, buckets = static_cast<int32_t>(space.map.buckets.size());
    for (int32_t b = buckets - 1; b >= -lag; --b) {
      if (b >= 0) run_pass(turn, grads, last, b);
      if (b + lag < buckets) gather_.start(space, space.map.buckets[b + lag]);
    }
    return;
  }
  run_pass(turn, grads, last);
  if (space.gathers_after_step()) gather_.start_all(space);
}

void Stepper::matrix_passes(Turn turn, const GradReducer& grads) {
  ParamSpace& space = turn.space;
  const auto iteration = NewtonSchulz::of(optim::Values(turn.rule.hyper, turn.hyper.data()));
  // On other devices only the device knows whether the step is skipped: then the passes do nothing, and the code
  // between them works on zeros.
  const bool skip = device_.device().is_cpu() && device_.read_step_scale().skip;
  for (auto b = static_cast<int32_t>(space.map.buckets.size()) - 1; b >= 0 && !skip; --b) {
    const plan::Bucket& bucket = space.map.buckets[b];
    turn.scratch = {at::zeros({bucket.shard_end - bucket.shard_begin},
                              at::TensorOptions().device(device_.device()).dtype(at::kFloat)),
                    bucket.shard_begin};
    for (size_t pass = 0; pass < turn.rule.passes.size(); ++pass) {
      run_pass(turn, grads, pass, b);
      if (!turn.rule.passes[pass].orthogonalises) continue;
      orthogonalise_bucket(
          store_, space, bucket, [&](size_t param) { return grads.used(param); }, iteration, turn.scratch.data);
    }
    if (space.gathers_after_step() && gather_.overlaps()) gather_.start(space, bucket);
  }
  if (!space.gathers_after_step() || gather_.overlaps() || skip) return;
  gather_.start_all(space);
}

void Stepper::exchange_passes(Turn turn, const GradReducer& grads, size_t pass) {
  for (auto b = static_cast<int32_t>(turn.space.map.buckets.size()) - 1; b >= 0; --b) {
    const plan::Bucket& bucket = turn.space.map.buckets[b];
    turn.scratch = {compressed_.scratch(bucket), bucket.shard_begin};
    run_pass(turn, grads, pass, b);
    compressed_.exchange(
        turn.space, bucket, [&](size_t param) { return grads.used(param); }, turn.scratch.data);
    run_pass(turn, grads, pass + 1, b);
  }
}

StepReport Stepper::report() {
  gather_.finish();
  for (const ParamSpace& space : store_.spaces())
    if (!beside_) memory_.arrive(space);
  const kernels::StepScale scale = device_.read_step_scale();
  if (scale.skip)
    for (float* count : stepped_) *count -= 1.0f;
  stepped_.clear();
  if (scale.skip == kernels::kSkipFailed) {
    const at::Tensor found = device_.failures().to(at::kCPU);
    fail(ErrorKind::kRuntime, failure_text(device_.take_failure(), found.data_ptr<double>(), store_.everyone().rank()),
         " The step was not made on any rank; the gradients are still there.");
  }
  device_.check();
  return {scale.norm, scale.grad_scale, scale.skip != 0};
}

void Stepper::scale_grads(const GradReducer& grads) {
  at::NoGradGuard no_grad;
  const float scale = grad_scale();
  if (scale == 1.0f) return;
  for (const ParamSpace& space : store_.spaces()) {
    if (space.grad.dtype != space.master.dtype) continue;
    const auto all = owned_runs(space, [&](size_t, size_t param) { return grads.used(param); });
    memory_.each_piece(space, space.grad, [&](int32_t bucket, storage::Medium at) {
      const LeasedRow grad = memory_.lease(space, space.grad, bucket, storage::Access::kUpdate, at);
      for (const UpdateRun& run : all) {
        if (bucket >= 0 && run.bucket != bucket) continue;
        const at::Tensor part = grad.narrow(run.bucket, run.begin, run.end);
        device_.copy(part, part, scale);
      }
    });
  }
}

void Stepper::ensure_slots(ParamSpace& space) {
  const size_t wanted = rules_.empty() ? 0 : rules_.at(space.key.param_group)->slots.size();
  while (space.slots.size() < wanted)
    space.slots.push_back(
        store_.make_buffer(space, "optimizer states", at::kFloat, space.in_place, space.key.placements.slot));
}

const Buffer* Stepper::slot(ParamSpace& space, int slot) {
  if (slot < 0 || slot >= static_cast<int>(slot_names_.size()))
    fail(ErrorKind::kIndex, "there is no optimizer slot ", slot, ": there are ", slot_names_.size());
  const std::vector<std::string>& own = rules_.at(space.key.param_group)->slots;
  const auto found = std::find(own.begin(), own.end(), slot_names_[slot]);
  if (found == own.end()) return nullptr;
  ensure_slots(space);
  return &space.slots[found - own.begin()];
}

}  // namespace ds::zero
