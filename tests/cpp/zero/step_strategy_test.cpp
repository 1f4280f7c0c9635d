// A strategy from outside the tree that updates every second extent later: what it puts by is added up and updated in
// every second step. Against AdamW on whole tensors: a parameter's elements are where both runs say.
#include "zero/step/strategies/step_strategy.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include "../error_of.h"
#include "base/error.h"
#include "trained_ranks.h"

namespace ds::zero {
namespace {

constexpr int kInterval = 2;

class OddExtentsLater : public StepStrategy {
 public:
  explicit OddExtentsLater(const StrategyParts& parts)
      : store_(parts.store), device_(parts.device), grads_(parts.grads), used_(store_.size()) {
    for (const ParamSpace& space : store_.spaces())
      put_by_.push_back(store_.make_buffer(space, "put by", at::kFloat, /*full=*/false));
    steps_ = at::zeros({static_cast<int64_t>(store_.size())});
  }

  static bool later(size_t extent) { return extent % 2 == 1; }

  std::vector<UpdatePart> parts(const StepInputs&) override {
    UpdatePart now;
    now.takes = [](const ParamSpace&, size_t extent) { return !later(extent); };
    const kernels::StepScale scale = device_.read_step_scale();
    if (scale.skip) return {now};
    if (count_ % kInterval == 0) {
      for (Buffer& buffer : put_by_) buffer.data.zero_();
      used_.assign(store_.size(), false);
    }
    for (size_t s = 0; s < store_.spaces().size(); ++s) {
      const ParamSpace& space = store_.spaces()[s];
      for (size_t e : space.owned) {
        const plan::Extent& extent = space.map.extents[e];
        if (!later(e) || !grads_.used(space.params[extent.param])) continue;
        const int64_t begin = space.offset_in(space.grad, extent);
        const at::Tensor fresh = store_.on_device(space.grad, {begin, begin + extent.numel});
        put_by_[s].data.narrow(0, extent.shard_offset, extent.numel).add_(fresh * scale.grad_scale);
      }
    }
    for (size_t param = 0; param < store_.size(); ++param) used_[param] = used_[param] || grads_.used(param);
    if (++count_ % kInterval != 0) return {now};
    UpdatePart later_part;
    later_part.takes = [](const ParamSpace&, size_t extent) { return later(extent); };
    later_part.grads = [this](const ParamSpace& space) -> const Buffer& {
      return put_by_[&space - store_.spaces().data()];
    };
    later_part.used = [this](size_t param) { return used_[param]; };
    later_part.steps = steps_;
    later_part.scale = &as_it_is_;
    return {now, later_part};
  }

  void settle() override { ++settled; }
  static thread_local int settled;

 private:
  ParamStore& store_;
  DeviceContext& device_;
  const GradReducer& grads_;
  std::vector<Buffer> put_by_;  // of each space, this rank's shard
  std::vector<bool> used_;
  at::Tensor steps_;
  const kernels::StepScale as_it_is_{0.0, 1.0f, 0};
  int count_ = 0;
};
thread_local int OddExtentsLater::settled = 0;

const StrategyRegistration registration("test odd extents later",
                                        [](const StrategyParts& parts) -> std::unique_ptr<StepStrategy> {
                                          return std::make_unique<OddExtentsLater>(parts);
                                        });

constexpr int kParams = 5, kSteps = 6;
constexpr double kMaxNorm = 0.5;

// Independent of the weights, so that what is updated when changes no gradient. The fourth is unused in some steps.
at::Tensor gradient(int param, int step) { return at::cos(at::arange(7 + 61 * param, at::kFloat) * (0.3 + step)); }
bool uses(int param, int step) { return param != 3 || step % 4 != 1; }

Program program() {
  Program made;
  for (int i = 0; i < kParams; ++i) made.begin.push_back(at::sin(at::arange(7 + 61 * i, at::kFloat)));
  made.loss = [](const std::vector<at::Tensor>& weights, int step, int rank, int part) {
    at::Tensor loss = at::zeros({});
    for (int i = 0; i < kParams; ++i)
      if (uses(i, step)) loss = loss + (weights[i] * gradient(i, step)).sum();
    return loss;
  };
  return made;
}

// Every element updated at once, and every element updated in each second step by the sum.
std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> plain_runs() {
  at::NoGradGuard no_grad;
  auto at_once = program().begin, later = program().begin;
  PlainAdamW first, second;
  std::vector<at::Tensor> sums(kParams);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> grads(kParams);
    for (int i = 0; i < kParams; ++i)
      if (uses(i, step)) grads[i] = gradient(i, step);
    const double clip = std::min(1.0, kMaxNorm / (first.step(at_once, grads, kMaxNorm) + 1e-6));
    for (int i = 0; i < kParams; ++i)
      if (uses(i, step)) sums[i] = sums[i].defined() ? sums[i] + grads[i] * clip : grads[i] * clip;
    if ((step + 1) % kInterval != 0) continue;
    second.step(later, sums, 0.0);
    sums.assign(kParams, at::Tensor());
  }
  return {at_once, later};
}

TEST(StepStrategy, ExtentsMayBeUpdatedLater) {
  const auto [at_once, later] = plain_runs();
  for (int stage : {0, 1, 2, 3}) {
    for (int world : {1, 2, 3}) {
      EngineOptions options;
      options.policy = stage_policy(stage);
      options.strategy = "test odd extents later";
      options.reducer.bucket_numel = 200;
      train_on(world, [&](const comm::ProcessMeshPtr& mesh) {
        OddExtentsLater::settled = 0;
        TrainingRank trained(program(), at::kFloat, options, mesh);
        Engine& engine = *trained.engine;
        for (int step = 0; step < kSteps; ++step) EXPECT_FALSE(trained.step(step, adam_inputs(kMaxNorm, true)).skipped);
        EXPECT_EQ(OddExtentsLater::settled, 0);  // no step asks for it
        int64_t delayed = 0;
        for (int i = 0; i < kParams; ++i) {
          at::Tensor expected = at_once[i].clone();
          const ParamSpace& space = engine.params().space_of(i);
          const auto index = engine.params().position(i).index;
          for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
            if (!OddExtentsLater::later(e)) continue;
            const plan::Extent& extent = space.map.extents[e];
            expected.narrow(0, extent.param_offset, extent.numel)
                .copy_(later[i].narrow(0, extent.param_offset, extent.numel));
            delayed += extent.numel;
          }
          const at::Tensor got = engine.states().full(StateKind::kMaster, 0, i);
          EXPECT_LE((got - expected).abs().max().item<double>(), 2e-6)
              << "stage " << stage << " world " << world << " rank " << trained.rank << " parameter " << i;
          if (stage < 3) {
            EXPECT_TRUE(at::equal(got, trained.weights[i].detach()));
          }
        }
        EXPECT_GT(delayed, 0);
        EXPECT_EQ(OddExtentsLater::settled, kParams);  // each look at the masters
        return trained.trained;
      });
    }
  }
}

TEST(StepStrategy, RulesOfWholeParametersTakeNoParts) {
  at::Tensor weight = at::ones({5}).set_requires_grad(true);
  EngineOptions options;
  options.strategy = "test odd extents later";
  auto engine = engine_of({{weight, "w", 0, 0}}, options);
  const optim::Rule& lamb = optim::find_rule("lamb");
  engine->stepper().set_rules({&lamb});
  run_backward(*engine, weight.sum());
  StepInputs inputs;
  for (const optim::Hyperparameter& one : lamb.hyper) inputs.hyper.resize(1), inputs.hyper[0].push_back(one.fallback);
  EXPECT_THROW(engine->step(inputs), Error);
}

TEST(StepStrategy, AnUnknownNameIsRefused) {
  at::Tensor weight = at::ones({5}).set_requires_grad(true);
  EngineOptions options;
  options.strategy = "none such";
  EXPECT_TRUE(says(error_of([&] {
                     engine_of({{weight, "w", 0, 0}}, options);
                   }),
                   "there is no step strategy 'none such'; there are: plain, speculative, test odd"));
}

}  // namespace
}  // namespace ds::zero
