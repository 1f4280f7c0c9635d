// Spaces with ranks of their own: "expert" parameters, of which each expert-parallel rank has other ones, beside dense
// parameters that all have. Ranks are threads; the measure is one process with all experts and the whole batch.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <random>

#include "../comm/thread_job.h"
#include "../error_of.h"
#include "../every_case.h"
#include "../on_threads.h"
#include "base/error.h"
#include "comm/transports/local_communicator.h"
#include "plan/spaces/space_rule.h"
#include "trained_ranks.h"
#include "zero/engine.h"
#include "zero/states/group_cut.h"

namespace ds::zero {
namespace {

using plan::Axes;

// A new kind of parallelism adds one rule. Experts are sharded (stage 0: replicated) over the ranks that hold the same
// expert, and the expert-parallel ranks hold the other elements of the norm.
const plan::SpaceRuleRegistration registration({"test experts", [](const plan::SpaceQuery& query) {
                                                  const Axes same{"experts.edp"}, others{"experts.ep"};
                                                  if (!query.shards) return plan::SpaceAxes{{}, same, {{others}}};
                                                  return plan::SpaceAxes{same, {}, {{same}, {others}}};
                                                }});

constexpr int kExperts = 2;  // and as many expert-parallel ranks: one each
constexpr double kMaxNorm = 0.3;

at::Tensor dense_weight(int which) { return values(which, {5, 3}).set_requires_grad(true); }
at::Tensor expert_weight(int expert) { return values(10 + expert, {7, 2}).set_requires_grad(true); }

struct Case {
  int stage, world, accumulate;
  int64_t bucket;
  bool overlap;
  bool each = false;  // reduce after each micro-step, whatever the stage
  bool peers = true;  // stage 3: values come out of memory that ranks share, else by collectives
  at::ScalarType type = at::kFloat;
  storage::Medium rest = storage::Medium::kDevice;  // of masters, gradients and states
};

// Each rank's part of the batch, in every micro-step. Expert 1 sees nothing of step 1, expert 0 is used in step 2 by
// the tokens of the first expert-parallel group alone.
// By collectives threads meet where they start one, so ranks that differ in backward would wait for each other there.
bool routed(const Case& c, int step, int source, int expert) {
  if (c.stage == 3 && !c.peers) return true;
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

// The parameters of all ranks: dense, dense, expert 0, expert 1.
Program whole_program(const Case& c) {
  return {{dense_weight(0), dense_weight(1), expert_weight(0), expert_weight(1)},
          [=](const std::vector<at::Tensor>& weights, int step, int source, int part) {
            at::Tensor loss =
                dense_loss(weights[0], step, source, part) + dense_loss(weights[1], step, source, part + 5);
            for (int expert = 0; expert < kExperts; ++expert)
              if (routed(c, step, source, expert)) loss = loss + expert_loss(weights[2 + expert], step, source, part);
            return loss;
          }};
}

// All ranks, those with the same expert, one of each expert.
comm::ProcessMeshPtr mesh_of(comm::Meeting& meeting, int rank, int world) {
  const plan::ProcessGrid grid(world, {{"pp", 1, ""}, {"dp", 0, ""}, {"sp", 1, ""}, {"tp", 1, ""}});
  auto found = std::make_shared<comm::ProcessMesh>(grid, comm::job_of(rank, world, meeting));
  found->fold("experts", {"dp", "sp"}, {{"edp", 0, ""}, {"ep", kExperts, ""}});
  return found;
}

std::shared_ptr<Engine> make_engine(const Case& c, const std::vector<at::Tensor>& params,
                                    const comm::ProcessMeshPtr& mesh) {
  std::vector<ParamSpec> specs = {{params[0], "a", 0, 0}, {params[1], "expert", 0, 1}, {params[2], "b", 0, 2}};
  specs[1].rule = "test experts";
  const Axes own{"experts.edp"};
  if (c.stage == 3)
    specs[1].sharded = std::make_shared<ShardedParam>(params[1], "expert", mesh->size(own), mesh->rank(own));
  EngineOptions options;
  options.policy = stage_policy(c.stage);
  options.placements.master.rest = options.placements.grad.rest = options.placements.slot.rest = c.rest;
  options.reducer.bucket_numel = c.bucket;
  options.reducer.overlap = c.overlap;
  options.reducer.predivide = 1.0 / c.world;  // of experts, too: by all ranks, not by those that have the expert
  options.gatherer.persistence_numel = c.bucket == 20 ? 15 : 0;  // the expert stays gathered, or nothing does
  return engine_of(specs, options, mesh);
}

// A checkpoint's row of the group has the dense parameters end to end, as if there were no expert between them.
void check_cut(Engine& engine, int world, int rank) {
  const GroupCut cut(engine.params(), engine.states(), 0);
  EXPECT_EQ(cut.size(), (30 + 2 * world - 1) / (2 * world) * 2);
  const at::Tensor a = engine.states().full(StateKind::kMaster, 0, 0),
                   b = engine.states().full(StateKind::kMaster, 0, 2);
  const at::Tensor row = at::zeros({cut.size() * world});
  row.narrow(0, 0, 30).copy_(at::cat({a.reshape({-1}), b.reshape({-1})}));
  const at::Tensor own = cut.partition(engine.states().pieces(StateKind::kMaster, 0));
  EXPECT_TRUE(at::equal(own, row.narrow(0, rank * cut.size(), cut.size()))) << "rank " << rank << " of " << world;
  for (const GroupCut::Slice& slice : cut.slices()) EXPECT_NE(slice.param, 1u);
}

void compare(const Case& c, int steps) {
  const Trained reference = in_one_process(whole_program(c), steps, c.world, c.accumulate, kMaxNorm);
  comm::Meeting meeting(/*waits=*/false, c.peers);
  const bool exact = c.type == at::kFloat;
  on_threads(c.world, [&](int rank) {
    const int expert = rank % kExperts, group = rank / kExperts;
    std::vector<at::Tensor> params;
    for (const at::Tensor& value : {dense_weight(0), expert_weight(expert), dense_weight(1)})
      params.push_back(value.detach().to(c.type).set_requires_grad(true));
    const auto engine = make_engine(c, params, mesh_of(meeting, rank, c.world));
    ASSERT_EQ(engine->params().spaces().size(), 2u);
    use_adam(*engine);
    ParamGatherer* gatherer = engine->gatherer();
    if (gatherer) {
      EXPECT_STREQ(gatherer->source().name(), c.peers ? "peer memory" : "scheduled collectives");
      for (const ShardedParamPtr& param : engine->params().sharded_params()) gatherer->add_unit(param->name(), {param});
    }
    const auto with = [&](int index, const auto& loss_of) {
      if (gatherer) gatherer->enter(index, {});
      const at::Tensor loss = loss_of(params[index]);
      if (gatherer) gatherer->leave(index, {loss});
      return loss.to(at::kFloat);
    };
    for (int step = 0; step < steps; ++step) {
      for (int part = 0; part < c.accumulate; ++part) {
        if (gatherer) gatherer->begin_forward();
        at::Tensor loss = with(0, [&](const at::Tensor& w) { return dense_loss(w, step, rank, part); }) +
                          with(2, [&](const at::Tensor& w) { return dense_loss(w, step, rank, part + 5); });
        for (int source = group * kExperts; source < (group + 1) * kExperts; ++source)
          if (routed(c, step, source, expert))
            loss = loss + with(1, [&](const at::Tensor& w) { return expert_loss(w, step, source, part); });
        if (gatherer) gatherer->end_forward({loss});
        run_backward(*engine, loss / c.accumulate,
                     c.each || part + 1 == c.accumulate || engine->policy().reduce == ReduceAt::kMicroStep);
      }
      EXPECT_EQ(engine->grads().used(1), routed(c, step, 0, expert)) << "step " << step;
      const StepReport report = engine->step(adam_inputs(kMaxNorm));
      EXPECT_NEAR(report.norm, reference.norms[step], (exact ? 1e-5 : 2e-2) * reference.norms[step])
          << "rank " << rank << " step " << step;
    }
    const std::string what = words("stage", c.stage, "world", c.world, "rank", rank, "parameter");
    const auto values = [&](size_t i) {
      if (!gatherer) return params[i].detach();
      const std::vector<ShardedParam*> one = {engine->params().spec(i).sharded.get()};
      gatherer->acquire(one);
      const at::Tensor found = params[i].detach().clone();
      gatherer->release(one);
      return found;
    };
    std::vector<at::Tensor> masters;
    for (size_t i = 0; i < params.size(); ++i) {
      masters.push_back(engine->states().full(StateKind::kMaster, 0, i));
      EXPECT_TRUE(at::equal(masters[i].to(c.type), values(i))) << i;
    }
    expect_near(masters, {reference.params[0], reference.params[2 + expert], reference.params[1]}, exact ? 2e-6 : 2e-2,
                what);
    if (c.stage == 1 || c.stage == 2) check_cut(*engine, c.world, rank);
    // Everybody who has it does.
    engine->states().set_full(StateKind::kMaster, 0, 1, at::ones({7, 2}) * (expert + 3));
    engine->states().finish_step();
    engine->stepper().publish();
    EXPECT_TRUE(at::equal(values(1), (at::ones({7, 2}) * (expert + 3)).to(c.type)));
  });
}

TEST(ParamSpace, ExpertsEqualOneProcess) {
  NewPairs sample;
  for (int stage : {0, 1, 2})
    for (int world : {2, 4, 8})
      for (int accumulate : {1, 2})
        for (int64_t bucket : {1, 20, 1000000})
          if (sample({stage, world, accumulate, bucket})) compare({stage, world, accumulate, bucket, bucket != 20}, 6);
}

TEST(ParamSpace, ExpertsRestOnTheHost) {
  for (int stage : {1, 2, 3})
    for (int accumulate : {1, 2})
      compare({stage, 4, accumulate, 20, true, false, true, at::kFloat, storage::Medium::kHost}, 4);
}

// Values of an expert come from the ranks that have it, of dense parameters from all; norms, flags and sums as below.
TEST(ParamSpace, ExpertsEqualOneProcessWhereParametersAreSharded) {
  NewPairs sample;
  for (int world : {2, 4, 8})
    for (int accumulate : {1, 2, 3})
      for (at::ScalarType type : {at::kFloat, at::kBFloat16})
        if (sample({world, accumulate, static_cast<int>(type)}))
          compare({3, world, accumulate, accumulate == 2 ? 20 : 1000000, true, false, true, type}, 5);
}

// The gathers of both groups in one order.
TEST(ParamSpace, ExpertsEqualOneProcessByCollectives) {
  NewPairs sample;
  for (int world : {2, 4, 8})
    for (int accumulate : {1, 2, 3})
      for (at::ScalarType type : {at::kFloat, at::kBFloat16})
        if (sample({world, accumulate, static_cast<int>(type)}))
          compare({3, world, accumulate, accumulate == 2 ? 20 : 1000000, false, false, false, type}, 5);
}

// Each rank calls its expert or not, and dense parameters in an order of its own: nobody waits for ever, whatever the
// other ranks of either group do.
TEST(ParamSpace, RandomBranchesOfExperts) {
  for (bool peers : {true, false}) {
    for (int world : {2, 4, 8}) {
      const Case c{3, world, 1, 1000000, false, false, peers};
      comm::Meeting meeting(/*waits=*/false, peers);
      on_threads(world, [&](int rank) {
        const std::vector<at::Tensor> params = {dense_weight(0), expert_weight(rank % kExperts), dense_weight(1)};
        const std::vector<at::Tensor> before = {dense_weight(0), expert_weight(rank % kExperts), dense_weight(1)};
        const auto engine = make_engine(c, params, mesh_of(meeting, rank, world));
        std::mt19937 random(rank);
        for (int step = 0; step < 200; ++step) {
          for (int call = 0; call < 6; ++call) {
            const auto which = step / 20 % 2 == 0 ? call % 3 : static_cast<int>(random() % 3);
            if (step / 20 % 2 != 0 && random() % 4 == 0) continue;
            ShardedParam* param = engine->params().spec(which).sharded.get();
            engine->gatherer()->source().gather({param}, {});
            ASSERT_TRUE(at::equal(params[which].detach(), before[which].detach()));
            param->release();
          }
          engine->gatherer()->source().drain();
        }
      });
    }
  }
}

// A second reduction before the step: of experts it is no mean over the ranks that have them.
TEST(ParamSpace, ExpertsReducedAfterEachMicroStep) {
  for (int stage : {0, 1})
    for (int world : {2, 8}) compare({stage, world, 3, 20, true, true}, 4);
}

TEST(ParamSpace, EqualKeysShareASpace) {
  std::vector<ParamSpec> specs;
  for (int i = 0; i < 6; ++i)
    specs.push_back(
        {at::ones({2}, i < 4 ? at::kFloat : at::kDouble).set_requires_grad(true), std::to_string(i), i % 2, i});
  const auto engine = engine_of(specs);
  ASSERT_EQ(engine->params().spaces().size(), 4u);  // two groups in two types
  EXPECT_EQ(engine->params().spaces()[0].params, (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(engine->params().sets().size(), 1u);
}

std::string complaint(const std::vector<ParamSpec>& specs, const EngineOptions& options,
                      const comm::ProcessMeshPtr& mesh) {
  return failure_of<Error>([&] { engine_of(specs, options, mesh); });
}

TEST(ParamSpace, NamesWhatIsMissing) {
  std::vector<ParamSpec> specs = {{at::ones({2}).set_requires_grad(true), "w", 0, 0}};
  specs[0].rule = "no such rule";
  EXPECT_TRUE(says(complaint(specs, {}, mesh_over(comm::local_communicator())), "'no such rule'"));
  specs[0].rule = "test experts";
  const std::string text = complaint(specs, {}, mesh_over(comm::local_communicator()));
  EXPECT_TRUE(says(text, "there is no axis experts.edp: the grid has dp, pp, sp, tp"));
  EngineOptions options;
  options.policy = stage_policy(3);
  comm::Meeting meeting(/*waits=*/false, /*peers=*/false);
  on_threads(6, [&](int rank) {
    std::vector<ParamSpec> own = {{at::ones({2}).set_requires_grad(true), "w", 0, 0}};
    own[0].rule = "test experts";
    own[0].sharded = std::make_shared<ShardedParam>(own[0].tensor, "w", 1, 0);
    const std::string slices = complaint(own, options, mesh_of(meeting, rank, 6));
    const std::string end = "ranks are 3, and this is rank " + std::to_string(rank / kExperts);
    EXPECT_EQ(
        slices.find("parameter 'w' is cut into 1 slices, of which this is number 0; by the rule 'test experts' its " +
                    end),
        0u)
        << slices;
  });
}

}  // namespace
}  // namespace ds::zero
