// Buckets that are stepped while backward still runs change no bit of training: against the same run without it, where
// guesses hold and where they do not.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <random>

#include "../storage/planes.h"
#include "base/error.h"
#include "storage/tier.h"
#include "trained_ranks.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

using storage::Medium;

constexpr int kWeights = 6;

struct Case {
  int stage, world;
  at::ScalarType type = at::kFloat;
  std::string rule = "adam";
  int micro_steps = 1, steps = 8;
  bool check = true;
  int64_t bucket = 20;
  std::string strategy = "speculative";
  storage::Budget budget{};
  Placements placements{};
  bool disturb = true;  // reads, aborted backwards, changed hyperparameters, changed gradients
};

// Steps 0, 1 and 2 need no clipping, 3 does; 5 is not finite.
double factor_of(int step) { return step == 5 ? INFINITY : step % 4 == 3 ? 1000.0 : 1e-3; }

std::vector<Trained> train(const Case& c) {
  EngineOptions options = small_options(c.stage);
  options.placements = c.placements;
  options.budget = c.budget;
  options.strategy = c.strategy;
  options.reducer.bucket_numel = c.bucket;
  return train_on(c.world, [&](const comm::ProcessMeshPtr& mesh) {
    TrainingRank rank(small_program(kWeights, factor_of), c.type, options, mesh, c.rule);
    for (int step = 0; step < c.steps; ++step) {
      StepInputs inputs = rank.inputs(0.5f, c.check, 0.05 / (1 + step));
      inputs.loss_scale = c.type == at::kHalf ? 8.0f : 1.0f;
      rank.accumulate(step, inputs, c.micro_steps);
      if (c.disturb && step == 6) inputs.hyper[0][0] *= 0.5;  // after the guess
      if (c.disturb && step == 2) rank.engine->states().full(StateKind::kMaster, 0, 2);
      if (c.disturb && step == 7)
        rank.engine->states().set_full(StateKind::kGrad, 0, 0, values(77, rank.weights[0].sizes()) * 1e-3);
      EXPECT_EQ(rank.update(inputs).skipped, c.check && step == 5);
    }
    return rank.finish();
  });
}

// Returns the figures of all ranks together.
std::map<std::string, double> compare(Case c) {
  if (c.placements == Placements{}) {
    c.placements.master = c.placements.slot = at_rest(Medium::kHost);
    if (c.stage > 1) c.placements.grad = at_rest(Medium::kHost);
  }
  const std::vector<Trained> ahead = train(c);
  c.strategy = "plain";
  const std::vector<Trained> plain = train(c);
  std::map<std::string, double> all;
  for (int rank = 0; rank < c.world; ++rank) {
    const std::string what =
        words("stage", c.stage, "rank", rank, "of", c.world, c.rule, c.type, c.micro_steps, "micro-steps");
    expect_same(ahead[rank], plain[rank], what, 0, /*nan=*/!c.check);
    for (const auto& [name, value] : ahead[rank].figures) all[name] += value;
  }
  return all;
}

TEST(Speculative, ChangesNoBit) {
  for (int stage : {1, 2, 3}) {
    for (int world : {1, 2, 3, 8}) {
      for (at::ScalarType type : {at::kFloat, at::kBFloat16}) {
        for (int micro_steps : {1, 3}) {
          if ((stage + world + micro_steps / 2 + (type == at::kFloat)) % 2 > 0)
            continue;  // half of them hold every pair
          const auto figures = compare({stage, world, type, "adam", micro_steps});
          EXPECT_GT(figures.at("buckets stepped ahead"), 0) << stage << " " << world << " " << micro_steps;
          EXPECT_GT(figures.at("buckets undone"), 0) << stage << " " << world << " " << micro_steps;
        }
      }
    }
  }
  EXPECT_GT(compare({2, 2, at::kHalf}).at("buckets undone"), 0);
}

TEST(Speculative, RulesAndPlacements) {
  for (const char* rule : {"adagrad", "lion", "sgd"})
    EXPECT_GT(compare({2, 2, at::kBFloat16, rule}).at("buckets stepped ahead"), 0) << rule;
  // They look at whole parameters: every bucket waits for the step.
  for (const char* rule : {"lamb", "muon"})
    EXPECT_EQ(compare({2, 2, at::kBFloat16, rule}).at("buckets stepped ahead"), 0) << rule;
  // Gradients, or states, that are elsewhere; a share of the buckets on the host.
  Case c{2, 2, at::kBFloat16};
  c.placements = {at_rest(Medium::kHost), {}, {}};
  EXPECT_GT(compare(c).at("buckets stepped ahead"), 0);
  c.placements = {{}, {}, at_rest(Medium::kHost)};
  EXPECT_EQ(compare(c).at("buckets stepped ahead"), 0);
  c.stage = 3;
  c.placements = {at_rest(Medium::kHost), {}, at_rest(Medium::kHost)};
  c.placements.master.host_share = c.placements.slot.host_share = 0.5;
  EXPECT_GT(compare(c).at("buckets stepped ahead"), 0);
  c.check = false;  // what is not finite is stepped, and never ahead
  compare(c);
}

TEST(Speculative, WithoutDisturbanceMostBucketsAreAhead) {
  Case c{2, 2, at::kBFloat16};
  c.disturb = false;
  c.steps = 3;
  const auto figures = compare(c);
  EXPECT_GE(figures.at("buckets stepped ahead"), 2 * 2 * 2);
  EXPECT_EQ(figures.at("buckets undone"), 0);
}

// Copies that do not fit are not made: those buckets wait for the step.
TEST(Speculative, CopiesBeyondTheBudgetWait) {
  Case c{2, 1, at::kBFloat16};
  c.budget.bytes[Medium::kHost] = 1;
  const auto figures = compare(c);
  EXPECT_EQ(figures.at("buckets stepped ahead"), 0);
  EXPECT_GT(figures.at("buckets without room for copies"), 0);
}

struct One {
  at::Tensor weight = at::ones({40}).set_requires_grad(true);
  at::Tensor second = at::ones({40}).set_requires_grad(true);
  std::shared_ptr<Engine> engine;

  explicit One(const Placements& placements, int stage = 2) {
    EngineOptions options;
    options.policy = stage_policy(stage);
    options.placements = placements;
    options.strategy = "speculative";
    options.reducer.bucket_numel = 1;
    engine = engine_of({{weight, "w", 0, 0}, {second, "v", 0, 1}}, options);
    use_adam(*engine);
  }
  void backward(double factor = 1e-3) {
    engine->strategy().expect(adam_inputs(1.0f));
    run_backward(*engine, ((weight + second) * factor).sum());
  }
  at::Tensor master() { return engine->states().full(StateKind::kMaster, 0, 1); }
};

// A step frees the copies and the new weights that its backward has made ahead of it.
TEST(Speculative, StepsFreeTheirCopies) {
  const storage::Placement host = at_rest(Medium::kHost);
  One one({host, host, host});
  for (int step = 0; step < 3; ++step) {
    one.backward();
    one.engine->step(adam_inputs(1.0f));
  }
  EXPECT_GT(one.engine->strategy().figures().at("buckets stepped ahead"), 0);
  const std::weak_ptr<storage::ShardStorage> storage = one.engine->params().storage();
  const storage::Usage usage = storage.lock()->usage();
  EXPECT_EQ(usage.leases, 0);
  EXPECT_EQ(usage[static_cast<size_t>(Medium::kHost)].scratch, 0);
  one.engine.reset();
  EXPECT_TRUE(storage.expired());
}

// Gradients that are dropped, and backwards that raise, leave masters and states as they were.
TEST(Speculative, WhatIsForgottenIsUndone) {
  const storage::Placement host = at_rest(Medium::kHost);
  One one({host, host, host});
  one.backward();
  one.engine->step(adam_inputs(1.0f));
  const at::Tensor before = one.master(), moment = one.engine->states().full(StateKind::kSlot, 0, 1);
  one.backward();
  one.engine->clear_grads();
  EXPECT_GT(one.engine->strategy().figures().at("buckets undone"), 0);
  EXPECT_TRUE(at::equal(one.master(), before));
  EXPECT_TRUE(at::equal(one.engine->states().full(StateKind::kSlot, 0, 1), moment));
  EXPECT_FALSE(one.engine->grads().any());

  one.engine->strategy().expect(adam_inputs(1.0f));
  one.engine->backward().begin(true);
  one.weight.register_hook([](const at::Tensor& grad) -> at::Tensor { throw std::runtime_error("no"); });
  EXPECT_THROW(((one.second * 2).sum() + one.weight.sum()).backward(), std::exception);
  one.engine->backward().abort();
  EXPECT_TRUE(at::equal(one.master(), before));
  EXPECT_FALSE(one.engine->grads().used(1));
}

// A tier that can be slow, and can fail.
struct Troubled {
  static std::atomic<bool> fails;
  class Part : public storage::Part {
   public:
    explicit Part(const storage::PartSpec& spec) {
      for (int64_t bytes : spec.block_bytes) blocks_.emplace_back(bytes, 0);
    }
    void read(size_t block, char* data) override {
      if (fails) fail(ErrorKind::kRuntime, "the troubled tier cannot read");
      std::copy(blocks_[block].begin(), blocks_[block].end(), data);
    }
    void write(size_t block, char* data) override {
      std::copy(data, data + blocks_[block].size(), blocks_[block].begin());
    }

   private:
    std::vector<std::vector<char>> blocks_;
  };
  class Tier : public storage::Tier {
   public:
    std::unique_ptr<storage::Part> open(const storage::PartSpec& spec) override { return std::make_unique<Part>(spec); }
  };
};
std::atomic<bool> Troubled::fails{false};
const storage::TierRegistration troubled("troubled", [](const storage::TierContext&) -> std::unique_ptr<storage::Tier> {
  return std::make_unique<Troubled::Tier>();
});

// The step tells of an error in the thread; nothing has changed by then.
TEST(Speculative, ErrorsOfTheThreadAreThrownByTheStep) {
  const storage::Placement there = at_rest(storage::medium_named("troubled"));
  One one({there, {}, there});
  one.backward();
  one.engine->step(adam_inputs(1.0f));
  one.engine->params().storage()->settle();
  const at::Tensor before = one.master();
  Troubled::fails = true;
  one.backward();
  EXPECT_THROW(one.engine->step(adam_inputs(1.0f)), Error);
  Troubled::fails = false;
  EXPECT_TRUE(at::equal(one.master(), before));
  EXPECT_TRUE(one.engine->grads().any());  // still there
  one.engine->step(adam_inputs(1.0f));
  EXPECT_FALSE(at::equal(one.master(), before));
}

// Stage 1 on one rank shows gradients as `.grad`, which the user may change between backward and step.
TEST(Speculative, GradientsThatTheUserChanges) {
  const storage::Placement host = at_rest(Medium::kHost);
  One changed({host, {}, host}, 1), plain({host, {}, host}, 1);
  for (One* one : {&changed, &plain}) {
    for (int step = 0; step < 3; ++step) {
      one->backward();
      at::NoGradGuard no_grad;
      if (one == &plain) one->engine->strategy().forget();
      if (one->second.grad().defined()) one->second.grad().mul_(-1.0);
      one->engine->step(adam_inputs(1.0f));
    }
  }
  EXPECT_TRUE(at::equal(changed.second, plain.second));
  EXPECT_TRUE(at::equal(changed.weight, plain.weight));
}

TEST(Speculative, GradientsThatTheUserReplaces) {
  const storage::Placement host = at_rest(Medium::kHost);
  One changed({host, {}, host}, 1), plain({host, {}, host}, 1);
  for (One* one : {&changed, &plain}) {
    for (int step = 0; step < 3; ++step) {
      one->backward();
      if (one == &plain) one->engine->strategy().forget();
      if (one->second.grad().defined()) one->second.mutable_grad() = at::full_like(one->second.grad(), 0.5 + step);
      one->engine->step(adam_inputs(1.0f));
    }
  }
  EXPECT_TRUE(at::equal(changed.second, plain.second));
}

}  // namespace
}  // namespace ds::zero
