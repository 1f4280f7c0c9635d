// Each element counts once in the norm that clips a step, whoever holds copies of it: weights that stages tie,
// parameters that slices have whole, experts over any ranks, ranks that share sequences. Ranks are threads, over all
// grids of 1 to 16 of them.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "../comm/thread_job.h"
#include "../error_of.h"
#include "../every_case.h"
#include "comm/transports/local_communicator.h"
#include "plain_adamw.h"
#include "small_engine.h"
#include "trained_ranks.h"
#include "zero/engine.h"
#include "zero/step/norm_sums.h"

namespace ds::zero {
namespace {

using comm::ProcessMesh;
using comm::Purpose;
using plan::Axes;

// The experts on tensor-parallel ranks: cut as other weights are, whole on each, or other ones on each.
enum class OnSlices { kCut, kCopied, kOthers };

struct Case {
  int world, pp, dp, sp, tp, expert, stage;
  OnSlices slices;

  std::string text() const {
    return words("world", world, "pp", pp, "dp", dp, "sp", sp, "tp", tp, "experts", expert, "stage", stage, "slices",
                 static_cast<int>(slices));
  }
};

at::Tensor weight(double seed) { return values(seed, {3, 2}); }

// Gradients of parameters, by what they are for.
double split_seed(int stage, int slice) { return 1000 + stage * 20 + slice; }
double shared_seed(int stage) { return 2000 + stage; }
constexpr double kTiedSeed = 3000;
double expert_seed(int stage, int slice, int expert) { return 4000 + stage * 400 + slice * 20 + expert; }
// Some stages have no experts.
bool has_experts(int stage) { return stage % 2 == 0; }

// One process with all parameters: what a clipped step makes of each, by the seed of its gradient, and the norm.
struct Whole {
  std::map<double, at::Tensor> params;
  double norm;
};

constexpr double kMaxNorm = 0.5;

Whole in_one_process(const Case& c) {
  std::set<double> seeds{kTiedSeed};
  for (int stage = 0; stage < c.pp; ++stage) {
    seeds.insert(shared_seed(stage));
    for (int slice = 0; slice < c.tp; ++slice) seeds.insert(split_seed(stage, slice));
    for (int expert = 0; expert < c.expert && has_experts(stage); ++expert)
      for (int slice = 0; slice < (c.slices == OnSlices::kCut ? c.tp : 1); ++slice)
        seeds.insert(expert_seed(stage, slice, expert));
  }
  std::vector<at::Tensor> params, grads;
  for (double seed : seeds) {
    params.push_back(at::ones({3, 2}));
    grads.push_back(weight(seed));
  }
  Whole made;
  made.norm = PlainAdamW().step(params, grads, kMaxNorm);
  for (double seed : seeds) made.params[seed] = params[made.params.size()];
  return made;
}

void compare(const Case& c, const Whole& whole, int rank, const comm::JobPtr& job) {
  const auto meshed = std::make_shared<ProcessMesh>(
      plan::ProcessGrid(c.world, {{"pp", c.pp, ""}, {"dp", c.dp, ""}, {"sp", c.sp, ""}, {"tp", c.tp, ""}}), job);
  ProcessMesh& mesh = *meshed;
  const int stage = mesh.rank({"pp"}), slice = mesh.rank({"tp"});
  const Axes from = c.slices == OnSlices::kOthers ? Axes{"dp", "sp", "tp"} : Axes{"dp", "sp"};
  mesh.fold("experts", from, {{"edp", 0, ""}, {"ep", c.expert, ""}});

  const std::string copied = slice > 0 ? "tp" : "";
  std::vector<ParamSpec> specs;
  std::vector<double> seeds;
  double scale = 1;  // of the gradient of the last one
  const auto add = [&](const std::string& name, double seed, const std::string& copied_along) {
    specs.push_back({at::ones({3, 2}).set_requires_grad(true), name, 0, static_cast<int32_t>(specs.size())});
    specs.back().copied_along = copied_along;
    seeds.push_back(seed);
  };
  add("split", split_seed(stage, slice), "");
  add("shared", shared_seed(stage), copied);
  if (stage == 0 || stage == c.pp - 1) add("tied", kTiedSeed, stage > 0 ? "pp" : copied);
  if (has_experts(stage)) {
    const int other = c.slices == OnSlices::kCut ? slice : 0;
    // Means are over all ranks with the same weights, and some of them hold the expert.
    scale = static_cast<double>(c.dp * c.sp) / mesh.size({"experts.edp"});
    add("expert", expert_seed(stage, other, mesh.rank({"experts.ep"})), c.slices == OnSlices::kCopied ? copied : "");
    specs.back().rule = "experts";
  }
  EngineOptions options;
  options.policy = stage_policy(c.stage);
  options.reducer.predivide = 1.0 / (c.dp * c.sp);
  const auto engine = engine_of(specs, options, meshed);
  use_adam(*engine);
  at::Tensor loss = at::zeros({});
  for (size_t i = 0; i < specs.size(); ++i)
    loss = loss + (specs[i].tensor * weight(seeds[i])).sum() * (specs[i].rule == "experts" ? scale : 1.0);
  run_backward(*engine, loss);
  EXPECT_NEAR(engine->step(adam_inputs(kMaxNorm)).norm, whole.norm, 1e-6 * whole.norm) << c.text() << "rank " << rank;
  for (size_t i = 0; i < specs.size(); ++i) {
    const double gap = (specs[i].tensor.detach() - whole.params.at(seeds[i])).abs().max().item<double>();
    EXPECT_LE(gap, 1e-6) << c.text() << "rank " << rank << " parameter " << specs[i].name;
  }
}

void compare(const Case& c) {
  const Whole whole = in_one_process(c);
  comm::on_ranks_of_job(c.world, [&](int rank, const auto& job) { compare(c, whole, rank, job); });
}

TEST(Norm, EachElementCountsOnce) {
  NewPairs sample;
  for (int world = 1; world <= 16; ++world) {
    for (int pp = 1; pp <= world; ++pp) {
      for (int sp = 1; pp * sp <= world; ++sp) {
        for (int tp = 1; pp * sp * tp <= world; ++tp) {
          if (world % (pp * sp * tp) != 0) continue;
          const int dp = world / (pp * sp * tp);
          for (OnSlices slices : {OnSlices::kCut, OnSlices::kCopied, OnSlices::kOthers}) {
            if (tp == 1 && slices != OnSlices::kCut) continue;
            const int among = dp * sp * (slices == OnSlices::kOthers ? tp : 1);
            for (int expert = 1; expert <= among; ++expert) {
              if (among % expert != 0) continue;
              for (int stage : {0, 1, 2})
                if (sample({world, pp, sp, tp, expert, stage, static_cast<int>(slices)}))
                  compare({world, pp, dp, sp, tp, expert, stage, slices});
            }
          }
        }
      }
    }
  }
}

TEST(Norm, EachElementCountsOnceOnSixteenRanks) {
  for (int stage : {0, 1, 2})
    for (OnSlices slices : {OnSlices::kCut, OnSlices::kCopied, OnSlices::kOthers})
      for (int expert : {2, 4}) compare({16, 2, 2, 2, 2, expert, stage, slices});
}

// Spaces with the same remaining lists of ranks share one call: their sums are added before it.
void expect_shared_calls(const comm::JobPtr& job) {
  const auto mesh = std::make_shared<ProcessMesh>(
      plan::ProcessGrid(8, {{"pp", 2, ""}, {"dp", 2, ""}, {"sp", 1, ""}, {"tp", 2, ""}}), job);
  mesh->fold("experts", {"dp", "sp"}, {{"edp", 1, ""}, {"ep", 2, ""}});
  std::vector<ParamSpec> specs;
  for (const char* rule : {"dense", "experts", "dense", "dense"})
    specs.push_back({at::ones({2}).set_requires_grad(true), std::to_string(specs.size()), 0, 0, nullptr,
                     GradForm::kDense, rule, specs.size() == 3 ? "pp" : ""});
  EngineOptions options;
  options.policy = stage_policy(1);
  const auto engine = engine_of(specs, options, mesh);
  const ParamStore& store = engine->params();
  EXPECT_EQ(store.spaces().size(), 3u);
  EXPECT_EQ(store.sets().size(), 2u);  // a copy travels with all others
  const NormSums sums(store, at::zeros({3}, at::kDouble));
  EXPECT_EQ(sums.calls(), 4u);  // data-parallel and expert-parallel ranks, then slices and stages once
  EXPECT_EQ(sums.of(store.position(0).space).data_ptr(), sums.total().data_ptr());
  EXPECT_TRUE(sums.of(store.position(1).space).defined());
  EXPECT_FALSE(sums.of(store.position(3).space).defined());
  specs = {{at::ones({2}).set_requires_grad(true), "w", 0, 0}};
  specs[0].copied_along = "dp";
  EXPECT_EQ(error_of([&] { engine_of(specs, options, mesh); }),
            "a parameter is copied along the axis 'dp'; 'tp' and 'pp' are known");
}

TEST(Norm, SpacesShareCalls) {
  comm::on_ranks_of_job(8, [](int, const auto& job) { expect_shared_calls(job); });
}

}  // namespace
}  // namespace ds::zero
