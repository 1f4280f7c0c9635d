// SuperOffload: a bucket whose masters rest on the host is stepped there when its gradients arrive, while backward goes
// on with the others. Nobody knows the norm by then.
//
// [Note: guesses]
// The guess is that the step will be made, that its gradients need no clipping, that no more gradients come for the
// bucket and that nobody changes hyperparameters. Before such an update masters and states are copied. The step
// compares what it knows with the guess, bit by bit. Where they agree the new weights go to the model, and nothing else
// is left to do; where not, the copies come back and the bucket is stepped as any other. So the results are those of a
// run without this strategy, always. The model's weights change in the step alone.
//
// [Note: when not to guess]
// After a step whose guess was wrong, or would have been, the next one is not guessed: where every step is clipped,
// nothing is wasted. A bucket whose copies do not fit into the host's budget waits for the step, as do buckets that do
// not rest on the host and rules that look at whole parameters.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "zero/step/strategies/background.h"
#include "zero/step/strategies/step_strategy.h"
#include "zero/step/stepper.h"

namespace ds::zero {

namespace {

using storage::Access;
using storage::Medium;

// A bucket that is stepped ahead.
struct Ahead {
  int32_t space, bucket;
  std::vector<uint8_t> used;         // of each parameter of the engine, as guessed
  LeasedRow lp;                      // new weights, laid out as the row of masters
  std::vector<storage::Lease> kept;  // of the masters, then of each state
  RunsByCount runs;
  bool stepped = false;  // by the thread
  bool wrong = false;
  std::shared_future<void> done;
};

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

class Speculative : public StepStrategy, public GradArrivals {
 public:
  explicit Speculative(const StrategyParts& parts)
      : store_(parts.store),
        device_(parts.device),
        grads_(parts.grads),
        stepper_(*parts.stepper),
        host_(std::max(1, parts.options.threads)),
        copies_(store_.storage()->add_scratch_user(storage::Reuse::kAnySize)),
        confirmed_(store_.spaces().size()) {}

  // ---- the guess
  // ------------------------------------------------------------------------------------------------------
  bool expects() const override { return true; }
  GradArrivals* arrivals() override { return this; }

  void expect(const StepInputs& inputs) override {
    if (!ahead_.empty()) return;  // the step of these comes first
    at::NoGradGuard no_grad;
    guess_ = inputs.hyper;
    const double none = 0;
    host_.table().finish_norm({}, &none, nullptr, inputs.loss_scale, inputs.max_norm, false, &scale_);
    guessing_ = !guess_.empty();
    for (ParamSpace& space : store_.spaces())
      if (guessing_) stepper_.ensure_slots(space);
  }

  bool wanted() const override { return guessing_ && would_have_held_; }

  void arrived(int32_t s, int32_t bucket, const std::vector<int32_t>& used) override {
    ParamSpace& space = store_.spaces()[s];
    if (used.empty() || !steps_on_host(space, bucket)) return;
    const plan::Range row = part_of(space, space.master, bucket);
    const int64_t numel = row.numel();
    const auto copies = static_cast<int64_t>(1 + space.slots.size());
    // Copies and new weights; where states are in files they and the gradient come to the host, too.
    const bool comes = store_.storage()->resting(space.master.plane, row) != Medium::kHost;
    const int64_t bytes =
        copies * 4 * (comes ? 2 : 1) + (comes ? 4 : 0) + static_cast<int64_t>(c10::elementSize(space.lp.dtype));
    if (!store_.storage()->has_room(Medium::kHost, numel * bytes)) {
      ++waited_;
      return;
    }
    auto ahead = std::make_shared<Ahead>();
    ahead->space = s;
    ahead->bucket = bucket;
    ahead->used.resize(store_.size());
    for (int32_t param : used) ahead->used[param] = 1;
    const auto scratch = [&](at::ScalarType type) {
      return store_.storage()->scratch(numel, type, Medium::kHost, copies_);
    };
    for (int64_t copy = 0; copy < copies; ++copy) ahead->kept.push_back(scratch(at::kFloat));
    ahead->lp = LeasedRow(space, space.master, bucket, scratch(space.lp.dtype));
    worker_.run([this, ahead] { step(*ahead); });
    ahead->done = worker_.last();
    ahead_.push_back(std::move(ahead));
  }

  void changed(int32_t space, int32_t bucket) override {
    for (const auto& ahead : ahead_) {
      if (ahead->space != space || ahead->bucket != bucket) continue;
      ahead->done.wait();
      ahead->wrong = true;
    }
  }

  void ended() override {
    versions_.clear();
    for (const ParamSpace& space : store_.spaces()) versions_.push_back(version_of(space));
  }

  void withdrawn() override { forget(); }
  void forget() override {
    guessing_ = false;
    withdraw();
  }
  void settle() override { forget(); }

  // ---- the step
  // -------------------------------------------------------------------------------------------------------
  std::vector<UpdatePart> parts(const StepInputs& inputs) override {
    at::NoGradGuard no_grad;
    const kernels::StepScale scale = device_.read_step_scale();
    const bool held = scale.skip == 0 && same_bits(scale.grad_scale, scale_.grad_scale);
    would_have_held_ = !guess_.empty() && held && guess_ == inputs.hyper;
    guessing_ = false;
    wait();
    bool any = false;
    for (auto& buckets : confirmed_) buckets.clear();
    for (const auto& ahead : ahead_) {
      const ParamSpace& space = store_.spaces()[ahead->space];
      const auto group = static_cast<size_t>(space.key.param_group);
      const bool right = held && !ahead->wrong && group < guess_.size() && guess_[group] == inputs.hyper.at(group) &&
                         used_as_guessed(*ahead) && versions_.at(ahead->space) == version_of(space);
      if (!right) {
        undo(*ahead);
        continue;
      }
      publish(*ahead);
      confirmed_[ahead->space].resize(space.map.buckets.size());
      confirmed_[ahead->space][ahead->bucket] = 1;
      any = true;
      ++kept_;
    }
    ahead_.clear();
    UpdatePart part;
    if (!any) return {part};
    part.takes = [this](const ParamSpace& space, size_t extent) {
      const std::vector<uint8_t>& of = confirmed_[&space - store_.spaces().data()];
      return of.empty() || !of[space.map.bucket_of[space.map.extents[extent].param]];
    };
    part.cuts = [this](const ParamSpace& space) { return !confirmed_[&space - store_.spaces().data()].empty(); };
    return {part};
  }

  std::map<std::string, double> figures() const override {
    return {{"buckets stepped ahead", static_cast<double>(kept_)},
            {"buckets undone", static_cast<double>(undone_)},
            {"buckets without room for copies", static_cast<double>(waited_)},
            {"ms waited", waited_ms_}};
  }

 private:
  bool steps_on_host(const ParamSpace& space, int32_t bucket) const {
    const optim::Rule& rule = stepper_.rule(space.key.param_group);
    if (!space.has_masters() || space.master.dtype != at::kFloat || !has_kernel_dtype(space.grad.dtype) ||
        rule.passes.size() != 1 || rule.scratch || rule.sums > 0)
      return false;
    const auto at = store_.storage()->resting(space.master.plane, part_of(space, space.master, bucket));
    return at != Medium::kDevice;
  }

  // A number that changes when somebody writes into the gradients of the space, or puts others into .grad.
  uint64_t version_of(const ParamSpace& space) const {
    uint64_t version = 0;
    for (const int32_t param : space.params) {
      const at::Tensor& shown = store_.spec(param).tensor.grad();
      if (!shown.defined()) continue;
      version = version * 31 + shown._version() + reinterpret_cast<uintptr_t>(shown.unsafeGetTensorImpl());
    }
    return version;
  }

  bool used_as_guessed(const Ahead& ahead) const {
    const ParamSpace& space = store_.spaces()[ahead.space];
    const plan::Bucket& bucket = space.map.buckets[ahead.bucket];
    for (int32_t index = bucket.first_param; index <= bucket.last_param; ++index) {
      const auto param = static_cast<size_t>(space.params[index]);
      if (grads_.used(param) != (ahead.used[param] != 0)) return false;
    }
    return true;
  }

  LeasedRow lease(const Ahead& ahead, const Buffer& buffer, Access access) const {
    return LeasedRow(*store_.storage(), store_.spaces()[ahead.space], buffer, ahead.bucket, access, Medium::kHost);
  }

  // On the thread.
  void step(Ahead& ahead) {
    at::NoGradGuard no_grad;
    const ParamSpace& space = store_.spaces()[ahead.space];
    const optim::Rule& rule = stepper_.rule(space.key.param_group);
    UpdateChoice choice;
    choice.bucket = ahead.bucket;
    choice.used = [&](size_t param) { return ahead.used[param] != 0; };
    choice.steps = stepper_.steps().data_ptr<float>();
    ahead.runs = runs_by_count(space, choice);
    UpdateRows rows;
    rows.grad = lease(ahead, space.grad, Access::kRead);
    rows.master = lease(ahead, space.master, Access::kUpdate);
    for (size_t slot = 0; slot < rule.slots.size(); ++slot)
      rows.slots.push_back(lease(ahead, space.slots[slot], Access::kUpdate));
    host_.copy(ahead.kept[0].data(), rows.master.data(), 1.0f);
    for (size_t slot = 0; slot < rows.slots.size(); ++slot)
      host_.copy(ahead.kept[slot + 1].data(), rows.slots[slot].data(), 1.0f);
    ahead.stepped = true;
    rows.lp = std::move(ahead.lp);
    update_runs(host_, space, rule, rule.passes[0], ahead.runs, rows, guess_.at(space.key.param_group), &scale_);
    ahead.lp = std::move(rows.lp);
  }

  void publish(const Ahead& ahead) {
    const ParamSpace& space = store_.spaces()[ahead.space];
    const LeasedRow lp(*store_.storage(), space, space.lp, ahead.bucket, Access::kUpdate, Medium::kDevice);
    for (const auto& [count, runs] : ahead.runs)
      for (const UpdateRun& run : runs)
        lp.narrow(run.bucket, run.begin, run.end).copy_(ahead.lp.narrow(run.bucket, run.begin, run.end));
  }

  void undo(Ahead& ahead) {
    if (!std::exchange(ahead.stepped, false)) return;
    const ParamSpace& space = store_.spaces()[ahead.space];
    const auto put_back = [&](const Buffer& buffer, const storage::Lease& kept) {
      host_.copy(lease(ahead, buffer, Access::kWrite).data(), kept.data(), 1.0f);
    };
    put_back(space.master, ahead.kept[0]);
    for (size_t slot = 0; slot < space.slots.size(); ++slot) put_back(space.slots[slot], ahead.kept[slot + 1]);
    ++undone_;
  }

  void withdraw() {
    at::NoGradGuard no_grad;
    for (const auto& ahead : ahead_) {
      ahead->done.wait();  // an error of it has changed nothing
      undo(*ahead);
    }
    ahead_.clear();
  }

  // Throws what the thread threw, when all that it did is undone.
  void wait() {
    const InPhase waiting(*store_.storage()->clock(), Phase::kOffload);
    const auto begin = Clock::now();
    for (const auto& ahead : ahead_) ahead->done.wait();
    waited_ms_ += 1e3 * seconds_since(begin);
    try {
      for (const auto& ahead : ahead_) ahead->done.get();
    } catch (...) {
      withdraw();
      throw;
    }
  }

  ParamStore& store_;
  DeviceContext& device_;
  const GradReducer& grads_;
  Stepper& stepper_;
  DeviceContext host_;  // of the thread, and of who puts back what it did
  const storage::ScratchUser copies_;
  std::vector<std::vector<double>> guess_;  // hyperparameters of each group; empty: there is none
  kernels::StepScale scale_{};
  bool guessing_ = false;
  bool would_have_held_ = true;  // the guess of the last step
  std::vector<std::shared_ptr<Ahead>> ahead_;
  std::vector<uint64_t> versions_;               // of each space's gradients, at the end of the backward
  std::vector<std::vector<uint8_t>> confirmed_;  // of each space, its buckets; empty: none
  int64_t kept_ = 0, undone_ = 0, waited_ = 0;
  double waited_ms_ = 0;
  Background worker_;  // last: it ends before what it works on
};

const StrategyRegistration speculative_registration("speculative",
                                                    [](const StrategyParts& parts) -> std::unique_ptr<StepStrategy> {
                                                      return std::make_unique<Speculative>(parts);
                                                    });

}  // namespace

}  // namespace ds::zero
