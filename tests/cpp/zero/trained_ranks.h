// Trainings of a few weights by ranks that are threads, the same trainings by one plain process, and the comparison of
// what they end with.
#pragma once
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "../on_threads.h"
#include "comm/communicator.h"
#include "comm/transports/thread_communicator.h"
#include "plain_adamw.h"
#include "small_engine.h"
#include "zero/engine.h"

namespace ds::zero {

// Numbers between -0.5 and 0.5 that differ from seed to seed.
inline at::Tensor values(double seed, at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  return at::sin(at::arange(numel, type) * 0.7 + seed).reshape(sizes) * 0.5;
}

// ---- what is trained ----------------------------------------------------------------------------------------------

struct Program {
  std::vector<at::Tensor> begin;  // the values with which weights begin
  // The loss of one micro-step on one rank.
  std::function<at::Tensor(const std::vector<at::Tensor>& weights, int step, int rank, int part)> loss;
  size_t trained = SIZE_MAX;  // weights from this number on are frozen
  bool each_alone = false;    // at stage 3 each weight is a module of its own, else one module has all
};

// A loss of one weight that depends on each of its elements.
inline at::Tensor loss_of(const at::Tensor& weight, double seed) {
  return at::tanh((weight * values(seed, weight.sizes()).to(weight.scalar_type())).to(at::kFloat)).square().sum();
}

inline double one(int step) { return 1.0; }

// Weights of odd sizes. Weight 1 is not used in step 1, nor is weight 3 by any but the first rank (unless ranks are
// `alike`). The loss of a step is multiplied by factor(step).
inline Program small_program(int count, double (*factor)(int step) = one, bool alike = false) {
  Program made;
  for (int i = 0; i < count; ++i) made.begin.push_back(values(i, {4 + i, 3}));
  made.loss = [=](const std::vector<at::Tensor>& weights, int step, int rank, int part) {
    at::Tensor loss = at::zeros({});
    for (int i = 0; i < count; ++i)
      if (!(i == 1 && step == 1) && !(i == 3 && rank > 0 && !alike))
        loss = loss + loss_of(weights[i], 100 * step + 10 * rank + part + i);
    return loss * factor(step);
  };
  return made;
}

// ---- who trains it ------------------------------------------------------------------------------------------------

// Values with which a training ends.
struct Trained {
  std::vector<at::Tensor> params, masters, slots;
  std::vector<double> norms;  // of each step
  storage::Usage usage{};
  std::map<std::string, double> figures{};  // of the strategy
};

// A bucket has about two of the small weights; the smallest weight stays gathered at stage 3.
inline EngineOptions small_options(int stage) {
  EngineOptions options;
  options.policy = stage_policy(stage);
  options.reducer.bucket_numel = 20;
  options.gatherer.persistence_numel = 13;
  return options;
}

// One rank of a training by an engine. Gradients are means over ranks.
struct TrainingRank {
  const Program program;
  const int rank;
  const optim::Rule& rule;
  std::vector<at::Tensor> weights;
  std::shared_ptr<Engine> engine;
  Trained trained;

  TrainingRank(Program of, at::ScalarType type, EngineOptions options, const comm::ProcessMeshPtr& mesh,
               const std::string& rule_name = "adam", int groups = 1)
      : program(std::move(of)), rank(mesh->rank(plan::same_weights())), rule(optim::find_rule(rule_name)) {
    const int world = mesh->size(plan::same_weights());
    for (size_t i = 0; i < program.begin.size(); ++i)
      weights.push_back(
          program.begin[i].detach().to(type, false, /*copy=*/true).set_requires_grad(i < program.trained));
    std::vector<ParamSpec> specs = specs_of(weights, groups);
    std::vector<ShardedParamPtr> frozen;
    for (ParamSpec& spec : specs) {
      if (!options.policy.shards_params()) break;
      spec.sharded = std::make_shared<ShardedParam>(spec.tensor, spec.name, world, rank);
      spec.sharded->id = 70 + spec.order;  // names its file
      if (!spec.tensor.requires_grad()) frozen.push_back(spec.sharded);
    }
    specs.resize(std::min(specs.size(), program.trained));
    options.reducer.predivide = 1.0 / world;
    engine = engine_of(specs, options, mesh, frozen);
    if (!specs.empty()) engine->set_rules(std::vector<const optim::Rule*>(groups, &rule));
    if (!engine->gatherer()) return;
    const auto all = engine->params().sharded_params();
    if (!program.each_alone) units_.push_back(engine->gatherer()->add_unit("all", all));
    for (size_t i = 0; program.each_alone && i < all.size(); ++i)
      units_.push_back(engine->gatherer()->add_unit("unit", {all[i]}));
  }

  void gather() {
    if (!engine->gatherer()) return;
    engine->gatherer()->begin_forward();
    for (int32_t unit : units_) engine->gatherer()->enter(unit, {});
  }

  at::Tensor forward(int step, int part) {
    gather();
    const at::Tensor loss = program.loss(weights, step, rank, part);
    for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) engine->gatherer()->leave(*unit, {loss});
    if (engine->gatherer()) engine->gatherer()->end_forward({loss});
    return loss;
  }

  // The micro-steps of a step. The engine is told before the last one what the step will be told.
  void accumulate(int step, const StepInputs& inputs, int micro_steps = 1) {
    for (int part = 0; part < micro_steps; ++part) {
      const at::Tensor loss = forward(step, part) / micro_steps * static_cast<double>(inputs.loss_scale);
      const bool last = part + 1 == micro_steps;
      if (last) engine->expect(inputs);
      run_backward(*engine, loss, last || engine->policy().reduce == ReduceAt::kMicroStep);
    }
  }

  StepReport update(const StepInputs& inputs) {
    const StepReport report = engine->step(inputs);
    trained.norms.push_back(report.norm);
    return report;
  }

  StepReport step(int step, const StepInputs& inputs, int micro_steps = 1) {
    accumulate(step, inputs, micro_steps);
    return update(inputs);
  }

  // The inputs of a step of any rule.
  StepInputs inputs(float max_norm, bool check, double lr) const {
    StepInputs made = adam_inputs(max_norm, check);
    made.hyper[0].clear();
    for (const auto& one : rule.hyper) made.hyper[0].push_back(one.name == "lr" ? lr : one.fallback);
    return made;
  }

  // The values with which it ends; at stage 3 weights stay gathered.
  Trained finish() {
    gather();
    for (size_t i = 0; i < weights.size(); ++i) {
      trained.params.push_back(weights[i].detach().clone());
      if (i >= program.trained) continue;
      trained.masters.push_back(engine->states().full(StateKind::kMaster, 0, i));
      for (size_t slot = 0; slot < rule.slots.size(); ++slot)
        trained.slots.push_back(engine->states().full(StateKind::kSlot, static_cast<int>(slot), i));
    }
    engine->params().storage()->settle();
    trained.usage = engine->params().storage()->usage();
    trained.figures = engine->strategy().figures();
    return trained;
  }

 private:
  std::vector<int32_t> units_;
};

// The results of train(rank) on each rank; all of them run at the same time.
template <typename Result, typename Train>
std::vector<Result> on_ranks(int world, const Train& train) {
  std::vector<Result> results(world);
  on_threads(world, [&](int rank) { results[rank] = train(rank); });
  return results;
}

// The results of train(mesh) on each rank. Gathers have communicators of their own, as in a job.
template <typename Result = Trained, typename Train>
std::vector<Result> train_on(int world, const Train& train, bool peer_memory = true) {
  const auto comms = comm::thread_communicators(world, peer_memory), gathers = comm::thread_communicators(world);
  return on_ranks<Result>(world, [&](int rank) { return train(mesh_over(comms[rank], gathers[rank])); });
}

// The parameters and norms of one plain process that computes the micro-steps of all ranks.
inline Trained in_one_process(const Program& program, int steps, int world, int micro_steps, double max_norm) {
  Trained run;
  for (const at::Tensor& value : program.begin) run.params.push_back(value.detach().clone().set_requires_grad(true));
  PlainAdamW optimizer;
  for (int step = 0; step < steps; ++step) {
    at::Tensor loss = at::zeros({});
    for (int rank = 0; rank < world; ++rank)
      for (int part = 0; part < micro_steps; ++part) loss = loss + program.loss(run.params, step, rank, part);
    (loss / (world * micro_steps)).backward();
    std::vector<at::Tensor> grads;
    for (at::Tensor& param : run.params) {
      grads.push_back(param.grad().defined() ? param.grad().clone() : at::Tensor());
      param.mutable_grad() = at::Tensor();
    }
    run.norms.push_back(optimizer.step(run.params, grads, max_norm));
  }
  for (at::Tensor& param : run.params) param = param.detach();
  return run;
}

// ---- whether it is the same ---------------------------------------------------------------------------------------

// The name of a case, for the message of a failed comparison.
template <typename... Parts>
std::string words(const Parts&... parts) {
  std::ostringstream text;
  ((text << parts << " "), ...);
  return text.str();
}

// The same bits. With `nan`, one that is not a number equals another.
inline void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, const std::string& what,
                        bool nan = false) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    const bool same = nan ? (a[i].eq(b[i]) | (a[i].isnan() & b[i].isnan())).all().item<bool>() : at::equal(a[i], b[i]);
    EXPECT_TRUE(same) << what << " " << i;
  }
}

inline void expect_near(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected, double bound,
                        const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_LE((found[i].to(at::kDouble) - expected[i]).abs().max().item<double>(), bound) << what << " " << i;
}

// The bound is relative where norms are below 1. A step that is finite in neither training has no norm.
inline void expect_norms(const std::vector<double>& found, const std::vector<double>& expected, double bound,
                         const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (size_t step = 0; step < found.size(); ++step)
    if (std::isfinite(found[step]) || std::isfinite(expected[step])) {
      EXPECT_NEAR(found[step], expected[step], bound * std::min(1.0, expected[step])) << what << ", step " << step;
    }
}

inline void expect_same(const Trained& a, const Trained& b, const std::string& what, double norm_bound = 0,
                        bool nan = false) {
  expect_same(a.params, b.params, what + ", parameter", nan);
  expect_same(a.masters, b.masters, what + ", master", nan);
  expect_same(a.slots, b.slots, what + ", slot", nan);
  expect_norms(a.norms, b.norms, norm_bound, what);
}

}  // namespace ds::zero
