// ZenFlow against its schedule, written down in float64 on whole tensors; where everything, or nothing, is chosen
// against runs without it; and states that go on where others stood.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "../error_of.h"
#include "../every_case.h"
#include "../storage/planes.h"
#include "base/error.h"
#include "trained_ranks.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

using storage::Medium;

struct Case {
  int stage = 2, world = 1;
  ZenFlowOptions flow{};
  std::string strategy = "zenflow";
  at::ScalarType type = at::kFloat;
  int steps = 14, micro_steps = 1;
  int64_t bucket = 30;
  float max_norm = 0.3f, loss_scale = 1.0f;
  int look = -1;  // after this step somebody reads all masters
  int save = -1;  // after this step another engine goes on with the states
  bool grads_on_host = false;
  std::string folder{};  // masters and states rest in files there
};

const std::vector<std::vector<int64_t>> kShapes{{6, 10}, {7}, {5, 9}, {3, 4, 2}, {8, 6}};
constexpr int kSkipped = 4;  // a step that is not finite, where the case checks

// Columns differ in size, and more so with time. Parameter 2 is not used in every fourth step.
at::Tensor gradient(int param, int step) {
  at::Tensor grad = values(31 * param + 3 * step, kShapes[param], at::kDouble);
  const int64_t rows = kShapes[param][0], columns = grad.numel() / rows;
  const at::Tensor scale = at::cos(at::arange(columns, at::kDouble) * (1.0 + 0.05 * step) + param).square() + 0.01;
  return (grad.reshape({rows, columns}) * scale).reshape(kShapes[param]);
}
bool uses(int param, int step) { return param != 2 || step % 4 != 1; }
double rate(int step) { return 0.02 / (1.0 + 0.1 * step); }

Program program() {
  Program made;
  for (size_t i = 0; i < kShapes.size(); ++i)
    made.begin.push_back(values(100 + static_cast<double>(i), kShapes[i], at::kDouble));
  made.loss = [](const std::vector<at::Tensor>& weights, int step, int rank, int part) {
    at::Tensor loss = at::zeros({});
    for (int i = 0; i < static_cast<int>(weights.size()); ++i)
      if (uses(i, step)) loss = loss + (weights[i].to(at::kFloat) * gradient(i, step).to(at::kFloat)).sum();
    return step == kSkipped ? loss * INFINITY : loss;
  };
  return made;
}

// ---- the schedule -------------------------------------------------------------------------------------------------

// The weights with which the model computes after each step: masters, but for the rest with overlap.
std::vector<at::Tensor> schedule(const Case& c) {
  at::NoGradGuard no_grad;
  const ZenFlowOptions& flow = c.flow;
  const AdamArgs a = adam_args();
  const size_t count = kShapes.size();
  std::vector<at::Tensor> w = program().begin, m, v, chosen, rest(count), shown;
  for (const auto& tensor : w) {
    m.push_back(at::zeros_like(tensor));
    v.push_back(at::zeros_like(tensor));
    chosen.push_back(at::ones_like(tensor));
    shown.push_back(tensor.clone());
  }
  std::vector<double> steps(count), late_steps(count);
  std::vector<bool> late_used(count);
  bool made_choice = false, pending = false;
  int64_t in_interval = 0, since = 0, made = 0;
  double norms = 0;
  const auto update = [&](size_t i, const at::Tensor& grad, const at::Tensor& mask, double number, double lr) {
    const at::Tensor next_m = m[i] * a.beta1 + grad * (1 - a.beta1),
                     next_v = v[i] * a.beta2 + grad * grad * (1 - a.beta2);
    const double c1 = 1 - std::pow(a.beta1, number), c2 = 1 - std::pow(a.beta2, number);
    const at::Tensor next = w[i] * (1 - lr * a.weight_decay) - next_m / c1 / (at::sqrt(next_v / c2) + a.eps) * lr;
    m[i] = at::where(mask > 0, next_m, m[i]);
    v[i] = at::where(mask > 0, next_v, v[i]);
    w[i] = at::where(mask > 0, next, w[i]);
  };
  const auto show = [&](bool all) {
    for (size_t i = 0; i < count; ++i) shown[i] = all ? w[i].clone() : at::where(chosen[i] > 0, w[i], shown[i]);
  };
  for (int step = 0; step < c.steps; ++step) {
    std::vector<at::Tensor> grads(count);
    double squares = 0;
    for (size_t i = 0; i < count; ++i) {
      if (!uses(static_cast<int>(i), step)) continue;
      grads[i] = gradient(static_cast<int>(i), step);
      squares += grads[i].square().sum().item<double>();
    }
    if (step == kSkipped) continue;
    const double norm = std::sqrt(squares), clip = c.max_norm > 0 ? std::min(1.0, c.max_norm / (norm + 1e-6)) : 1.0;
    for (at::Tensor& grad : grads)
      if (grad.defined()) grad = grad * clip;
    if (made++ < flow.warm_up) {
      for (size_t i = 0; i < count; ++i) {
        if (!grads[i].defined()) continue;
        update(i, grads[i], at::ones_like(w[i]), steps[i] += 1, rate(step));
        late_steps[i] += 1;
      }
      show(true);
      continue;
    }
    if (!made_choice || (in_interval == 0 && since >= flow.select_interval)) {
      if (pending) show(true);
      pending = false;
      for (size_t i = 0; i < count; ++i) {
        if (kShapes[i].size() < 2) continue;
        const int64_t rows = kShapes[i][0], columns = w[i].numel() / rows;
        const at::Tensor sums =
            (grads[i].defined() ? grads[i] : at::zeros_like(w[i])).reshape({rows, columns}).abs().sum(0);
        const auto wanted = static_cast<int64_t>(static_cast<double>(columns) * flow.topk_ratio + 1e-9);
        const int64_t k = flow.topk_ratio > 0 ? std::max<int64_t>(1, wanted) : 0;
        at::Tensor mask = at::zeros({columns}, at::kDouble);
        const at::Tensor order = std::get<1>(at::sort(sums, /*stable=*/true, 0, /*descending=*/true));
        mask.index_fill_(0, order.narrow(0, 0, k), 1.0);
        chosen[i] = mask.expand({rows, columns}).reshape(kShapes[i]).contiguous();
      }
      made_choice = true;
      since = 0;
    }
    ++in_interval;
    ++since;
    double chosen_squares = 0, chosen_count = 0, rest_count = 0;
    for (size_t i = 0; i < count; ++i) {
      chosen_count += chosen[i].sum().item<double>();
      rest_count += (1 - chosen[i]).sum().item<double>();
      if (!grads[i].defined()) continue;
      chosen_squares += (grads[i] * chosen[i]).square().sum().item<double>();
      update(i, grads[i], chosen[i], steps[i] += 1, rate(step));
      rest[i] = rest[i].defined() ? rest[i] + grads[i] : grads[i];
      late_used[i] = true;
    }
    show(false);
    bool ends = flow.update_interval > 0 && in_interval >= flow.update_interval;
    if (flow.update_interval == 0) {
      norms += std::sqrt(std::max(0.0, squares * clip * clip - chosen_squares));
      ends = in_interval >= 16 ||
             norms / std::sqrt(rest_count) >= flow.auto_ratio * std::sqrt(chosen_squares) / std::sqrt(chosen_count);
    }
    if (!ends) continue;
    if (pending) show(true);
    for (size_t i = 0; i < count; ++i)
      if (late_used[i]) update(i, rest[i], 1 - chosen[i], late_steps[i] += 1, rate(step));
    rest.assign(count, at::Tensor());
    late_used.assign(count, false);
    in_interval = 0;
    norms = 0;
    pending = flow.overlap;
    if (!pending) show(true);
  }
  return shown;
}

// ---- the engine ---------------------------------------------------------------------------------------------------

TrainingRank make_rank(const Case& c, const comm::ProcessMeshPtr& mesh) {
  EngineOptions options;
  options.policy = stage_policy(c.stage);
  options.placements.master = options.placements.slot =
      storage::at_rest(c.folder.empty() ? Medium::kHost : Medium::kFile, c.folder);
  if (c.grads_on_host) options.placements.grad.rest = Medium::kHost;
  options.strategy = c.strategy;
  options.step.zenflow = c.flow;
  options.reducer.bucket_numel = c.bucket;
  options.gatherer.persistence_numel = 8;
  return {program(), c.type, options, mesh};
}

void make_step(const Case& c, TrainingRank& rank, int step) {
  AdamArgs args = adam_args();
  args.lr = rate(step);
  StepInputs inputs = adam_inputs(c.max_norm, true, 1, args);
  inputs.loss_scale = c.loss_scale;
  EXPECT_EQ(rank.step(step, inputs, c.micro_steps).skipped, step == kSkipped);
  rank.engine->clear_grads();  // as programs do: what was put by stays
}

// Everything that a checkpoint has, into an engine that is new.
void go_on_from(Engine& before, Engine& engine) {
  StateAccess &from = before.states(), &to = engine.states();
  const auto names = from.slot_names();
  EXPECT_EQ(names, to.slot_names());
  for (size_t i = 0; i < kShapes.size(); ++i) {
    to.set_full(StateKind::kMaster, 0, i, from.full(StateKind::kMaster, 0, i));
    for (int slot = 0; slot < static_cast<int>(names.size()); ++slot)
      to.set_full(StateKind::kSlot, slot, i, from.full(StateKind::kSlot, slot, i));
  }
  engine.stepper().steps().copy_(before.stepper().steps());
  to.restore_strategy(before.strategy().counters());
}

Trained train_rank(const Case& c, const comm::ProcessMeshPtr& mesh) {
  auto rank = std::make_unique<TrainingRank>(make_rank(c, mesh));
  for (int step = 0; step < c.steps; ++step) {
    make_step(c, *rank, step);
    if (step == c.look)
      for (size_t i = 0; i < kShapes.size(); ++i) rank->engine->states().full(StateKind::kMaster, 0, i);
    if (step != c.save) continue;
    auto next = std::make_unique<TrainingRank>(make_rank(c, mesh));
    go_on_from(*rank->engine, *next->engine);
    next->trained = rank->trained;
    rank = std::move(next);
  }
  return rank->finish();
}

std::vector<Trained> train(const Case& c) {
  return train_on(c.world, [&](const comm::ProcessMeshPtr& mesh) { return train_rank(c, mesh); });
}

ZenFlowOptions flow(double ratio, int64_t update, int64_t select, bool overlap = false) {
  ZenFlowOptions made;
  made.topk_ratio = ratio;
  made.auto_ratio = 0.99;
  made.update_interval = update;
  made.select = ZenFlowOptions::Select::kByStep;
  made.select_interval = select;
  made.overlap = overlap;
  return made;
}

void expect_schedule(const Case& c, const std::string& what) {
  const auto expected = schedule(c);
  const auto found = train(c);
  for (int rank = 0; rank < c.world; ++rank)
    expect_near(found[rank].params, expected, c.type == at::kFloat ? 3e-6 : 4e-3,
                words(what, "stage", c.stage, "rank", rank, "of", c.world, "parameter"));
}

TEST(ZenFlow, FollowsItsSchedule) {
  NewPairs sample;
  for (int stage : {1, 2, 3}) {
    for (int world : {1, 2, 3, 8}) {
      for (bool overlap : {false, true}) {
        if (!sample({stage, world, overlap})) continue;
        Case c{stage, world, flow(0.3, 3, 6, overlap)};
        expect_schedule(c, "intervals");
        c.flow.warm_up = 2;
        c.flow.update_interval = 0;
        c.flow.auto_ratio = 1.0;
        c.micro_steps = 2;
        c.grads_on_host = stage > 1;
        c.flow.offload = true;
        expect_schedule(c, "auto");
      }
    }
  }
}

TEST(ZenFlow, TypesRatiosAndScales) {
  for (double ratio : {0.0, 0.05, 0.5}) expect_schedule({2, 2, flow(ratio, 2, 2)}, "ratio");
  Case c{2, 2, flow(0.25, 4, 8, true)};
  c.loss_scale = 1024.0f;
  expect_schedule(c, "loss scale");
  c.max_norm = 0;
  expect_schedule(c, "no clipping");
  c.type = at::kBFloat16;
  expect_schedule(c, "bf16");
}

TEST(ZenFlow, InFilesAsOnTheHost) {
  const io::Folder folder;
  for (bool overlap : {false, true}) {
    Case host{2, 2, flow(0.3, 3, 6, overlap), "zenflow", at::kBFloat16}, file = host;
    file.folder = folder.path();
    const auto expected = train(host), found = train(file);
    expect_same(found[1], expected[1], "in files");
  }
}

// "auto" updates the rest now and then, neither in every step nor never.
TEST(ZenFlow, AutoUpdatesNowAndThen) {
  Case c{2, 1, flow(0.3, 0, 100)};
  c.flow.auto_ratio = 1.0;
  const double updates = train(c)[0].figures.at("updates of the rest");
  EXPECT_GT(updates, 1);
  EXPECT_LT(updates, c.steps - 1);
  c.flow.auto_ratio = 0.0;
  EXPECT_EQ(train(c)[0].figures.at("updates of the rest"), c.steps - 1);
}

TEST(ZenFlow, EverythingAtOnceIsARunWithoutIt) {
  for (int stage : {1, 2, 3}) {
    for (int world : {1, 2}) {
      for (at::ScalarType type : {at::kFloat, at::kBFloat16}) {
        Case plain{stage, world};
        plain.type = type;
        plain.strategy = "plain";
        const auto expected = train(plain);
        Case warm = plain;
        warm.strategy = "zenflow";
        warm.flow = flow(0.1, 4, 4, true);
        warm.flow.warm_up = 1000;
        Case all = warm;
        all.flow = flow(1.0, 4, 4, true);
        for (const Case& c : {warm, all}) {
          const auto found = train(c);
          expect_same(found[0], expected[0], words("stage", stage, "world", world, type));
        }
      }
    }
  }
}

// Between two updates of the rest nothing but vectors and the chosen columns changes.
TEST(ZenFlow, TheRestWaitsForTheEndOfTheInterval) {
  const Case c{2, 1, flow(0.2, 3, 3)};
  TrainingRank rank = make_rank(c, mesh_over(comm::local_communicator()));
  for (int step = 0; step < 4; ++step) {
    const at::Tensor before = rank.weights[0].detach().clone();
    make_step(c, rank, step);
    const at::Tensor changed = (rank.weights[0].detach() != before).any(0);
    EXPECT_EQ(changed.sum().item<int64_t>(), step == 2 ? 10 : 2) << step;
  }
}

// Whoever looks, and whoever goes on from a checkpoint, gets the bits of a run that was left alone.
TEST(ZenFlow, LooksAndCheckpointsInsideAnInterval) {
  for (int stage : {1, 2, 3}) {
    for (int world : {1, 3}) {
      for (bool overlap : {false, true}) {
        Case c{stage, world, flow(0.3, 3, 6, overlap)};
        c.flow.warm_up = 1;
        const auto expected = train(c);
        for (int step : {0, 3, 6}) {
          Case looked = c, resumed = c;
          looked.look = step;
          resumed.save = step;
          const std::string what = words("after step", step, "stage", stage);
          const auto seen = train(looked), gone_on = train(resumed);
          for (int rank = 0; rank < world; ++rank) {
            expect_same(seen[rank], expected[rank], what + ", looked at");
            expect_same(gone_on[rank], expected[rank], what + ", resumed");
          }
        }
      }
    }
  }
}

TEST(ZenFlow, ChoicesByEpochs) {
  Case c{2, 1, flow(0.3, 2, 0)};
  c.flow.select = ZenFlowOptions::Select::kByEpoch;
  EXPECT_THROW(train_rank(c, mesh_over(comm::local_communicator())), Error);
  c.flow.steps_per_epoch = 4;
  EXPECT_EQ(train(c)[0].figures.at("choices"), 4);  // of 13 steps that are made
  c.flow.select_interval = 2;
  EXPECT_EQ(train(c)[0].figures.at("choices"), 2);
  c.flow.select = ZenFlowOptions::Select::kAuto;
  c.flow.select_interval = 0;
  EXPECT_EQ(train(c)[0].figures.at("choices"), 4);
  c.flow.steps_per_epoch = 0;
  EXPECT_EQ(train(c)[0].figures.at("choices"), 1);
}

TEST(ZenFlow, WhatItCannotUpdateIsRefused) {
  const Case c{2, 1, flow(0.3, 2, 4)};
  const TrainingRank rank = make_rank(c, mesh_over(comm::local_communicator()));
  for (const char* rule : {"lamb", "muon"}) EXPECT_THROW(rank.engine->set_rules({&optim::find_rule(rule)}), Error);
  EngineOptions options;
  options.policy = stage_policy(2);
  options.strategy = "zenflow";
  at::Tensor weight = at::ones({4, 4}).set_requires_grad(true);
  EXPECT_TRUE(says(error_of([&] { engine_of({{weight, "w", 0, 0}}, options); }), "offload_optimizer.device"));
}

}  // namespace
}  // namespace ds::zero
