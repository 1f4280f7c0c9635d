// ZenFlow: a few columns of each matrix, and all vectors, are updated in every step; gradients of the rest are added up
// on the host and updated there once in an interval of steps.
//
// [Note: schedule]
// The first `warm_up` steps update everything, as without this strategy. Then in every step that is not skipped:
//   1. In the first such step, and in the first of an interval when the choice is due: columns are chosen
//   (zenflow_choice.h).
//   2. What is chosen is updated by this step's gradient. Its bias correction counts the parameter's steps.
//   3. The rest's gradient of this step, unscaled and clipped by this step's factor, is added to the sum of the
//   interval.
//   4. In the last step of an interval the rest is updated by that sum, with the hyperparameters of this step; its bias
//      correction counts such updates (and warm-up steps). A parameter that no step of the interval has used is left
//      alone.
// An interval has update_interval steps. "auto": it ends when, by root mean square, the rest's gradients of the
// interval (the sum of their norms, so as if all pointed one way) have reached auto_ratio of the chosen gradients of
// this step; after kLongestInterval steps at the latest. Masters and states of elements go with them when they are
// chosen, and when they are not any more.
//
// [Note: overlap]
// The update of 4. then runs on a thread beside the next steps. The model gets its weights in the last step of the next
// interval, whenever it has ended, so that results do not depend on timing; or before columns are chosen anew. What is
// added up in 3. is copied on the device and added on a second thread.
//
// [Note: a save inside an interval]
// Masters and states are those after the update that runs; the model's weights may be older. So they are a state of
// their own while that is so, beside the sum of the interval.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/clock.h"
#include "base/error.h"
#include "base/ranges.h"
#include "zero/step/strategies/background.h"
#include "zero/step/strategies/step_strategy.h"
#include "zero/step/strategies/zenflow_choice.h"
#include "zero/step/stepper.h"

namespace ds::zero {

namespace {

using storage::Access;
using storage::Medium;

constexpr int64_t kLongestInterval = 16;
constexpr int64_t kStepsPerChoice = 100;  // if no epoch is known

storage::Placement on_host() {
  storage::Placement placement;
  placement.rest = Medium::kHost;
  return placement;
}

class ZenFlow : public StepStrategy {
 public:
  explicit ZenFlow(const StrategyParts& parts)
      : store_(parts.store),
        device_(parts.device),
        grads_(parts.grads),
        stepper_(*parts.stepper),
        options_(parts.options.zenflow),
        choice_(store_, device_, stepper_, options_),
        host_(std::max(1, options_.overlap ? parts.options.threads : device_.threads())),
        adding_(c10::Device(at::kCPU), 1),
        late_steps_(at::zeros({static_cast<int64_t>(store_.size())})),
        late_used_(store_.size()),
        copies_(store_.storage()->add_scratch_user(storage::Reuse::kAnySize)) {
    for (const ParamSpace& space : store_.spaces()) {
      const std::string name = space.params.empty() ? "" : store_.spec(space.params.front()).name;
      if (!store_.policy().shards_states())
        fail(ErrorKind::kValue, "zero_optimization.zenflow needs ZeRO stage 1, 2 or 3");
      if (!space.has_masters() || space.master.dtype != at::kFloat || !has_kernel_dtype(space.grad.dtype))
        fail(ErrorKind::kValue, "zero_optimization.zenflow needs fp32 masters on the host, and parameter '", name,
             "' has none: set zero_optimization.offload_optimizer.device to \"cpu\"; float64 has no masters");
      for (std::vector<Buffer>& sums : sums_)
        sums.push_back(store_.make_buffer(space, "ZenFlow gradients", at::kFloat, space.in_place, on_host()));
    }
  }

  void check(const optim::Rule& rule) const override {
    if (rule.passes.size() != 1 || rule.scratch || rule.sums > 0)
      fail(ErrorKind::kValue, "zero_optimization.zenflow updates parts of a parameter, and the optimizer '", rule.name,
           "' looks at whole ones: use Adam, AdamW, Lion, Adagrad or SGD, or leave zenflow out");
  }

  bool runs_beside() const override { return options_.overlap; }

  void set_steps_per_epoch(int64_t steps) override {
    if (options_.steps_per_epoch == 0) options_.steps_per_epoch = steps;
  }

  // ---- the step
  // -------------------------------------------------------------------------------------------------------
  std::vector<UpdatePart> parts(const StepInputs& inputs) override {
    at::NoGradGuard no_grad;
    const kernels::StepScale scale = device_.read_step_scale();
    if (scale.skip) return {UpdatePart{}};  // this part does nothing
    weights_kept_ = false;
    if (made_ < options_.warm_up) {
      ++made_;
      count_late(used());
      return {UpdatePart{}};
    }
    if (!choice_.made() || (in_interval_ == 0 && since_choice_ >= steps_per_choice())) choose();
    ++made_;
    if (!choice_.taken()) choice_.take();
    choice_.update(inputs, grads_, stepper_.steps().data_ptr<float>());
    ++in_interval_;
    ++since_choice_;
    if (choice_.rest_numel() > 0) {
      add_rest(scale.grad_scale);
      if (ends(inputs, scale)) update_rest(inputs);
    }
    UpdatePart none;  // this part counts the parameters' steps
    none.takes = [](const ParamSpace&, size_t) { return false; };
    return {none};
  }

  void settle() override {
    wait();
    at::NoGradGuard no_grad;
    choice_.put_back();
  }

  // ---- checkpoints
  // ----------------------------------------------------------------------------------------------------
  std::vector<std::string> state_names() const override {
    std::vector<std::string> names{"zenflow_gradient"};
    if (options_.overlap) names.emplace_back("zenflow_weight");
    return names;
  }

  const Buffer* state(const ParamSpace& space, size_t number) override {
    const auto s = static_cast<size_t>(&space - store_.spaces().data());
    if (number == 0) return &sums_[front_][s];
    keep_weights();
    return &weights_[s];
  }

  Counters counters() override {
    wait();
    Counters all;
    all["made"] = {static_cast<double>(made_)};
    all["in_interval"] = {static_cast<double>(in_interval_)};
    all["since_choice"] = {static_cast<double>(since_choice_)};
    all["norms"] = {norms_};
    all["unpublished"] = {unpublished_ ? 1.0 : 0.0};
    const float* late = late_steps_.data_ptr<float>();
    all["late_steps"].assign(late, late + store_.size());
    all["late_used"].assign(late_used_.begin(), late_used_.end());
    if (!choice_.made()) return all;
    for (size_t param = 0; param < store_.size(); ++param) {
      const std::vector<int64_t>& columns = choice_.columns()[param];
      all["columns." + store_.spec(param).name].assign(columns.begin(), columns.end());
    }
    return all;
  }

  bool restore(const Counters& counters) override {
    settle();
    const auto number = [&](const char* name) {
      const auto found = counters.find(name);
      return found == counters.end() || found->second.empty() ? 0.0 : found->second[0];
    };
    made_ = static_cast<int64_t>(number("made"));
    in_interval_ = static_cast<int64_t>(number("in_interval"));
    since_choice_ = static_cast<int64_t>(number("since_choice"));
    norms_ = number("norms");
    unpublished_ = number("unpublished") != 0;
    late_steps_.copy_(stepper_.steps());  // of a run that updated everything in every step
    if (counters.empty())
      each_bucket([&](ParamSpace& space, size_t s, int32_t bucket) {
        lease(space, sums_[front_][s], bucket, Access::kWrite, Medium::kHost).data().zero_();
      });
    late_used_.assign(store_.size(), 0);
    std::vector<std::vector<int64_t>> columns;
    for (size_t param = 0; param < store_.size(); ++param) {
      const auto found = counters.find("columns." + store_.spec(param).name);
      if (found == counters.end()) continue;
      columns.resize(store_.size());
      columns[param].assign(found->second.begin(), found->second.end());
    }
    choice_.set_columns(std::move(columns));
    if (const auto found = counters.find("late_steps");
        found != counters.end() && found->second.size() == store_.size())
      for (size_t param = 0; param < store_.size(); ++param)
        late_steps_.data_ptr<float>()[param] = static_cast<float>(found->second[param]);
    if (const auto found = counters.find("late_used"); found != counters.end() && found->second.size() == store_.size())
      late_used_.assign(found->second.begin(), found->second.end());
    if (!unpublished_ || !options_.overlap) {
      unpublished_ = false;
      return false;
    }
    keep_weights();
    each_bucket([&](ParamSpace& space, size_t s, int32_t bucket) {
      const LeasedRow from = lease(space, weights_[s], bucket, Access::kRead, Medium::kHost);
      lease(space, space.lp, bucket, Access::kUpdate, Medium::kDevice).data().copy_(from.data());
    });
    return true;
  }

  std::map<std::string, double> figures() const override {
    return {{"ms waited", waited_ms_},
            {"updates of the rest", static_cast<double>(updates_)},
            {"choices", static_cast<double>(choices_)},
            {"elements chosen", choice_.chosen_numel()},
            {"elements of the rest", choice_.rest_numel()}};
  }

 private:
  using Flags = std::vector<uint8_t>;

  Flags used() const {
    Flags flags(store_.size());
    for (size_t param = 0; param < flags.size(); ++param) flags[param] = grads_.used(param);
    return flags;
  }

  void count_late(const Flags& used) {
    for (size_t param = 0; param < used.size(); ++param) late_steps_.data_ptr<float>()[param] += used[param] ? 1 : 0;
  }

  int64_t steps_per_choice() const {
    const int64_t interval = options_.select_interval, epoch = options_.steps_per_epoch;
    if (options_.select == ZenFlowOptions::Select::kByEpoch && epoch == 0)
      fail(ErrorKind::kValue,
           "zero_optimization.zenflow.select_strategy \"epoch\" needs to know how many steps an epoch has: set "
           "zero_optimization.zenflow.steps_per_epoch, or give training_data to deepspeed.initialize");
    if (options_.select == ZenFlowOptions::Select::kByStep || epoch == 0)
      return interval > 0 ? interval : kStepsPerChoice;
    return std::max<int64_t>(1, interval) * epoch;
  }

  template <typename Visit>
  void each_bucket(const Visit& visit) {
    for (size_t s = 0; s < store_.spaces().size(); ++s)
      for (auto b = static_cast<int32_t>(store_.spaces()[s].map.buckets.size()) - 1; b >= 0; --b)
        visit(store_.spaces()[s], s, b);
  }

  LeasedRow lease(const ParamSpace& space, const Buffer& buffer, int32_t bucket, Access access, Medium at) const {
    return LeasedRow(*store_.storage(), space, buffer, bucket, access, at);
  }

  void wait() {
    const InPhase waiting(*store_.storage()->clock(), Phase::kOffload);
    const auto begin = Clock::now();
    adder_.wait();
    updater_.wait();
    waited_ms_ += 1e3 * seconds_since(begin);
  }

  void choose() {
    steps_per_choice();  // or says what is missing
    wait();
    publish();
    choice_.put_back();
    choice_.choose(grads_);
    since_choice_ = 0;
    ++choices_;
  }

  // ---- the rest
  // -------------------------------------------------------------------------------------------------------
  void add_rest(float scale) {
    for (size_t param = 0; param < store_.size(); ++param) late_used_[param] |= grads_.used(param) ? 1 : 0;
    const auto runs_of = [&](const ParamSpace& space, int32_t bucket) {
      auto runs = owned_runs(space, [&](size_t, size_t param) { return grads_.used(param); });
      erase_if(runs, [&](const UpdateRun& run) { return run.bucket != bucket; });
      return runs;
    };
    if (!options_.overlap) {
      each_bucket([&](ParamSpace& space, size_t s, int32_t bucket) {
        const auto runs = runs_of(space, bucket);
        if (runs.empty() || !choice_.leaves_rest(space, bucket)) return;
        const LeasedRow grad = lease(space, space.grad, bucket, Access::kRead, Medium::kHost);
        add(host_, runs, grad, lease(space, sums_[front_][s], bucket, Access::kUpdate, Medium::kHost), scale);
      });
      return;
    }
    adder_.wait();  // of the last step: what it read is free again
    struct Copied {
      const ParamSpace* space;
      size_t number;
      int32_t bucket;
      std::vector<UpdateRun> runs;
      LeasedRow grad;
    };
    const auto all = std::make_shared<std::vector<Copied>>();
    each_bucket([&](ParamSpace& space, size_t s, int32_t bucket) {
      auto runs = runs_of(space, bucket);
      if (runs.empty() || !choice_.leaves_rest(space, bucket)) return;
      const LeasedRow grad = lease(space, space.grad, bucket, Access::kRead, Medium::kDevice);
      LeasedRow copy(space, space.grad, bucket,
                     store_.storage()->scratch(grad.data().numel(), space.grad.dtype, Medium::kDevice, copies_));
      device_.copy(copy.data(), grad.data(), 1.0f);
      all->push_back({&space, s, bucket, std::move(runs), std::move(copy)});
    });
    std::optional<c10::Stream> stream;
    if (!device_.device().is_cpu())
      stream = c10::impl::VirtualGuardImpl(device_.device().type()).getStream(device_.device());
    adder_.run([this, all, scale, stream, front = front_] {
      at::NoGradGuard no_grad;
      c10::OptionalStreamGuard behind;
      if (stream) behind.reset_stream(*stream);
      for (Copied& one : *all)
        add(adding_, one.runs, one.grad,
            lease(*one.space, sums_[front][one.number], one.bucket, Access::kUpdate, Medium::kHost), scale);
      all->clear();
    });
  }

  static void add(DeviceContext& context, const std::vector<UpdateRun>& runs, const LeasedRow& grad,
                  const LeasedRow& sum, float scale) {
    for (const UpdateRun& run : runs)
      context.accumulate(sum.narrow(run.bucket, run.begin, run.end), grad.narrow(run.bucket, run.begin, run.end),
                         scale);
  }

  bool ends(const StepInputs& inputs, const kernels::StepScale& scale) {
    if (options_.update_interval > 0) return in_interval_ >= options_.update_interval;
    const NormSums& squares = choice_.squares();
    squares.add_up("norm of what is chosen");
    const double chosen = std::sqrt(squares.total().item<double>()) / inputs.loss_scale;
    const double rest = std::sqrt(std::max(0.0, scale.norm * scale.norm - chosen * chosen));
    const double clip = static_cast<double>(scale.grad_scale) * inputs.loss_scale;
    norms_ += rest * clip;
    if (in_interval_ >= kLongestInterval) return true;
    const auto mean = [](double norm, double numel) { return numel > 0 ? norm / std::sqrt(numel) : 0.0; };
    return mean(norms_, choice_.rest_numel()) >= options_.auto_ratio * mean(chosen * clip, choice_.chosen_numel());
  }

  void update_rest(const StepInputs& inputs) {
    const auto begin = Clock::now();
    if (options_.overlap) {
      const InPhase waiting(*store_.storage()->clock(), Phase::kOffload);
      updater_.wait();
    }
    publish();
    const auto work = [this, used = late_used_, steps = late_steps_.clone(), hyper = inputs.hyper, front = front_] {
      at::NoGradGuard no_grad;
      each_bucket([&](ParamSpace& space, size_t s, int32_t bucket) {
        if (choice_.leaves_rest(space, bucket)) update_bucket(space, sums_[front][s], bucket, used, steps, hyper);
      });
    };
    count_late(late_used_);
    late_used_.assign(store_.size(), 0);
    in_interval_ = 0;
    norms_ = 0;
    unpublished_ = true;
    ++updates_;
    if (options_.overlap) {
      updater_.run([work, added = adder_.last()] {
        if (added.valid()) added.get();
        work();
      });
      front_ = 1 - front_;
    } else {
      work();
      publish();
    }
    waited_ms_ += 1e3 * seconds_since(begin);
  }

  // Chosen elements are updated with the others: the planes hold stale values of them, which are not used.
  void update_bucket(ParamSpace& space, const Buffer& sums, int32_t bucket, const Flags& used, const at::Tensor& steps,
                     const std::vector<std::vector<double>>& hyper) {
    const optim::Rule& rule = stepper_.rule(space.key.param_group);
    UpdateChoice choice;
    choice.bucket = bucket;
    choice.used = [&](size_t param) { return used[param] != 0; };
    choice.steps = steps.data_ptr<float>();
    const RunsByCount runs = runs_by_count(space, choice);
    if (runs.empty()) return;
    UpdateRows rows;
    rows.master = lease(space, space.master, bucket, Access::kUpdate, Medium::kHost);
    rows.grad = lease(space, sums, bucket, Access::kUpdate, Medium::kHost);
    for (size_t slot = 0; slot < rule.slots.size(); ++slot)
      rows.slots.push_back(lease(space, space.slots[slot], bucket, Access::kUpdate, Medium::kHost));
    update_runs(host_, space, rule, rule.passes[0], runs, rows, hyper.at(space.key.param_group), nullptr);
    rows.grad.data().zero_();
  }

  // The model's weights become the masters of the rest.
  void publish() {
    if (!std::exchange(unpublished_, false)) return;
    each_bucket([&](ParamSpace& space, size_t, int32_t bucket) {
      if (!choice_.leaves_rest(space, bucket)) return;
      const LeasedRow lp = lease(space, space.lp, bucket, Access::kUpdate, Medium::kDevice);
      const LeasedRow master = lease(space, space.master, bucket, Access::kRead, Medium::kHost);
      for (const UpdateRun& run : owned_runs(space, [](size_t, size_t) { return true; }))
        if (run.bucket == bucket)
          device_.copy(lp.narrow(bucket, run.begin, run.end), master.narrow(bucket, run.begin, run.end), 1.0f);
      if (choice_.taken()) choice_.write_weights(space, bucket, lp.data());
    });
  }

  // The model's weights of this rank's shard, as they are now.
  void keep_weights() {
    if (std::exchange(weights_kept_, true)) return;
    const bool make = weights_.empty();
    each_bucket([&](ParamSpace& space, size_t s, int32_t) {
      if (make && weights_.size() <= s)
        weights_.push_back(store_.make_buffer(space, "ZenFlow weights", at::kFloat, space.in_place, on_host()));
    });
    each_bucket([&](ParamSpace& space, size_t s, int32_t bucket) {
      const LeasedRow lp = lease(space, space.lp, bucket, Access::kRead, Medium::kDevice);
      lease(space, weights_[s], bucket, Access::kUpdate, Medium::kHost).data().copy_(lp.data());
    });
  }

  ParamStore& store_;
  DeviceContext& device_;
  const GradReducer& grads_;
  Stepper& stepper_;
  ZenFlowOptions options_;
  ZenFlowChoice choice_;
  DeviceContext host_;           // updates the other elements
  DeviceContext adding_;         // adds up their gradients
  std::vector<Buffer> sums_[2];  // of each space: of the interval; of the last one, while it is updated
  int front_ = 0;
  std::vector<Buffer> weights_;
  bool weights_kept_ = false;
  at::Tensor late_steps_;              // updates of the rest that each parameter has seen
  Flags late_used_;                    // parameters with a gradient in this interval
  const storage::ScratchUser copies_;  // of gradients on their way
  int64_t made_ = 0, in_interval_ = 0, since_choice_ = 0;
  double norms_ = 0;          // of the rest's gradients, of the steps of this interval
  bool unpublished_ = false;  // an update of the rest has begun, and the model does not have it yet
  int64_t updates_ = 0, choices_ = 0;
  double waited_ms_ = 0;
  Background adder_, updater_;  // last: they end before what they work on
};

const StrategyRegistration zenflow_registration("zenflow",
                                                [](const StrategyParts& parts) -> std::unique_ptr<StepStrategy> {
                                                  return std::make_unique<ZenFlow>(parts);
                                                });

}  // namespace

}  // namespace ds::zero
