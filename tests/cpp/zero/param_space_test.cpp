// Spaces with ranks of their own: "expert" parameters, of which each expert-parallel rank has other ones, beside dense
// parameters that all have. Ranks are threads; the measure is one process with all experts and the whole batch.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"
#include "comm/transports/local_communicator.h"
#include "comm/transports/thread_communicator.h"
#include "plain_adamw.h"
#include "zero/engine.h"
#include "zero/space_rules/space_rule.h"

namespace ds::zero {
namespace {

// What a new kind of parallelism adds: one rule. Experts are sharded (stage 0: replicated) over the ranks that hold the
// same expert, and the expert-parallel ranks hold the other elements of the norm.
const SpaceRuleRegistration registration({"test experts",
                                          [](const ParamSpec&, const StagePolicy& policy, const EngineRanks& ranks) {
                                            const auto nobody = comm::local_communicator();
                                            const auto same = ranks.other("edp"), others = ranks.other("ep");
                                            if (!policy.shards_states()) return SpaceRanks{nobody, same, {others}};
                                            return SpaceRanks{same, nobody, {same, others}};
                                          }});

constexpr int kExperts = 2;  // and as many expert-parallel ranks: one each
constexpr double kMaxNorm = 0.3;

at::Tensor values(int seed, at::IntArrayRef sizes) {
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  return at::sin(at::arange(numel, at::kFloat) * 0.7 + seed).reshape(sizes) * 0.5;
}

at::Tensor dense_weight(int which) { return values(which, {5, 3}).set_requires_grad(true); }
at::Tensor expert_weight(int expert) { return values(10 + expert, {7, 2}).set_requires_grad(true); }

// Each rank's part of the batch, in every micro-step. Expert 1 sees nothing of step 1, expert 0 is used in step 2 by
// the tokens of the first expert-parallel group alone.
bool routed(int step, int source, int expert) {
  if (step % 4 == 1) return expert == 0;
  if (step % 4 == 2) return expert == 1 || source < kExperts;
  return true;
}
at::Tensor dense_loss(const at::Tensor& weight, int step, int source, int part) {
  return at::tanh(weight * values(100 * step + 10 * source + part, {5, 3})).square().sum();
}
at::Tensor expert_loss(const at::Tensor& weight, int step, int source, int part) {
  return at::tanh(weight * values(1000 + 100 * step + 10 * source + part, {7, 2})).square().sum();
}

struct Case {
  int stage, world, accumulate;
  int64_t bucket;
  bool overlap;
  bool each = false;  // reduce after each micro-step, whatever the stage
};

struct Trained {
  std::vector<at::Tensor> params;  // dense, dense, expert 0, expert 1
  std::vector<double> norms;
};

Trained in_one_process(const Case& c, int steps) {
  Trained run{{dense_weight(0), dense_weight(1), expert_weight(0), expert_weight(1)}, {}};
  PlainAdamW optimizer;
  for (int step = 0; step < steps; ++step) {
    at::Tensor loss = at::zeros({});
    for (int source = 0; source < c.world; ++source) {
      for (int part = 0; part < c.accumulate; ++part) {
        loss = loss + dense_loss(run.params[0], step, source, part) + dense_loss(run.params[1], step, source, part + 5);
        for (int expert = 0; expert < kExperts; ++expert)
          if (routed(step, source, expert)) loss = loss + expert_loss(run.params[2 + expert], step, source, part);
      }
    }
    (loss / (c.world * c.accumulate)).backward();
    std::vector<at::Tensor> grads;
    for (at::Tensor& param : run.params) {
      grads.push_back(param.grad().defined() ? param.grad().clone() : at::Tensor());
      param.mutable_grad() = at::Tensor();
    }
    run.norms.push_back(optimizer.step(run.params, grads, kMaxNorm));
  }
  return run;
}

void compare(const Case& c, int steps) {
  const Trained reference = in_one_process(c, steps);
  const int copies = c.world / kExperts;
  const auto dp = comm::thread_communicators(c.world);
  std::vector<std::vector<comm::CommunicatorPtr>> edp, ep;
  for (int expert = 0; expert < kExperts; ++expert) edp.push_back(comm::thread_communicators(copies));
  for (int group = 0; group < copies; ++group) ep.push_back(comm::thread_communicators(kExperts));

  std::vector<std::thread> threads;
  for (int rank = 0; rank < c.world; ++rank) {
    threads.emplace_back([&, rank] {
      const int expert = rank % kExperts, group = rank / kExperts;
      std::vector<at::Tensor> params = {dense_weight(0), expert_weight(expert), dense_weight(1)};
      std::vector<ParamSpec> specs = {{params[0], "a", 0, 0}, {params[1], "expert", 0, 1}, {params[2], "b", 0, 2}};
      specs[1].rule = "test experts";
      EngineOptions options;
      options.policy = stage_policy(c.stage);
      options.reducer.bucket_numel = c.bucket;
      options.reducer.overlap = c.overlap;
      options.reducer.predivide = 1.0 / c.world;  // of experts, too: by all ranks, not by those that have the expert
      EngineRanks ranks{dp[rank]};
      ranks.others = {{"edp", edp[expert][group]}, {"ep", ep[group][expert]}};
      auto engine = std::make_shared<Engine>(specs, std::vector<ShardedParamPtr>{}, options, ranks);
      ASSERT_EQ(engine->params().spaces().size(), 2u);
      use_adam(*engine);
      for (int step = 0; step < steps; ++step) {
        for (int part = 0; part < c.accumulate; ++part) {
          at::Tensor loss = dense_loss(params[0], step, rank, part) + dense_loss(params[2], step, rank, part + 5);
          for (int source = group * kExperts; source < (group + 1) * kExperts; ++source)
            if (routed(step, source, expert)) loss = loss + expert_loss(params[1], step, source, part);
          engine->backward().begin(c.each || part + 1 == c.accumulate ||
                                   engine->policy().reduce == ReduceAt::kMicroStep);
          (loss / c.accumulate).backward();
          engine->backward().end();
        }
        EXPECT_EQ(engine->grads().used(1), step % 4 != 1 || expert == 0) << "step " << step;
        const StepReport report = engine->step(adam_inputs(kMaxNorm));
        EXPECT_NEAR(report.norm, reference.norms[step], 1e-5 * reference.norms[step]) << "rank " << rank << step;
      }
      const std::vector<at::Tensor> expected = {reference.params[0], reference.params[2 + expert], reference.params[1]};
      for (size_t i = 0; i < params.size(); ++i) {
        const at::Tensor collected = engine->states().full(StateKind::kMaster, 0, i);
        EXPECT_LE((params[i] - expected[i]).abs().max().item<double>(), 2e-6)
            << "stage " << c.stage << " world " << c.world << " rank " << rank << " parameter " << i;
        EXPECT_TRUE(at::equal(collected, params[i].detach()));
      }
      engine->states().set_full(StateKind::kMaster, 0, 1,
                                at::ones({7, 2}) * (expert + 3));  // everybody who has it does
      engine->states().finish_step();
      engine->stepper().publish();
      EXPECT_TRUE(at::equal(params[1].detach(), at::ones({7, 2}) * (expert + 3)));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ParamSpace, ExpertsEqualOneProcess) {
  for (int stage : {0, 1, 2})
    for (int world : {2, 4, 8})
      for (int accumulate : {1, 2})
        for (int64_t bucket : {1, 20, 1000000}) compare({stage, world, accumulate, bucket, bucket != 20}, 6);
}

// A second reduction before the step: of experts it is no mean over the ranks that have them.
TEST(ParamSpace, ExpertsReducedAfterEachMicroStep) {
  for (int stage : {0, 1})
    for (int world : {2, 8}) compare({stage, world, 3, 20, true, true}, 4);
}

TEST(ParamSpace, EqualKeysShareASpace) {
  const auto dp = comm::local_communicator();
  std::vector<ParamSpec> specs;
  for (int i = 0; i < 6; ++i)
    specs.push_back(
        {at::ones({2}, i < 4 ? at::kFloat : at::kDouble).set_requires_grad(true), std::to_string(i), i % 2, i});
  Engine engine(specs, {}, EngineOptions{}, {dp});
  ASSERT_EQ(engine.params().spaces().size(), 4u);  // two groups in two types
  EXPECT_EQ(engine.params().spaces()[0].params, (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(engine.params().sets().size(), 1u);
}

std::string complaint(const std::vector<ParamSpec>& specs, const EngineOptions& options, const EngineRanks& ranks) {
  try {
    Engine(specs, {}, options, ranks);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ParamSpace, NamesWhatIsMissing) {
  std::vector<ParamSpec> specs = {{at::ones({2}).set_requires_grad(true), "w", 0, 0}};
  specs[0].rule = "no such rule";
  EXPECT_NE(complaint(specs, {}, {comm::local_communicator()}).find("'no such rule'"), std::string::npos);
  specs[0].rule = "test experts";
  const std::string text = complaint(specs, {}, {comm::local_communicator()});
  EXPECT_NE(text.find("'edp'"), std::string::npos) << text;
  EngineOptions options;
  options.policy = stage_policy(3);
  EngineRanks ranks{comm::thread_communicators(2)[0]};
  ranks.others = {{"edp", comm::local_communicator()}, {"ep", comm::local_communicator()}};
  specs[0].sharded = std::make_shared<ShardedParam>(specs[0].tensor, "w", 1, 0);
  EXPECT_NE(complaint(specs, options, ranks).find("'w'"), std::string::npos);
}

}  // namespace
}  // namespace ds::zero
