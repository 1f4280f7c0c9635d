// Steps of optimizers whose ranks exchange signs, with ranks as threads: each step of a run against a model of all
// ranks in fp64 that starts from the run's own state.
#include "zero/step/compressed_step.h"

#include <gtest/gtest.h>

#include <cmath>

#include "../comm/sign_model.h"
#include "../error_of.h"
#include "trained_ranks.h"

namespace ds::zero {
namespace {

using comm::largest_difference;
using comm::Tensors;
using optim::Phase;

// The state of one rank: values of each parameter, one-dimensional, in fp64.
struct State {
  std::map<std::string, Tensors> of;  // "weight", the slots, "error", "owned"

  const at::Tensor& operator()(const char* name, size_t param) const { return of.at(name)[param]; }
};

struct Step {
  State before, after;
  Tensors grads;  // this rank's own, unscaled and not clipped; undefined: none
  StepReport report;
  bool local = false, apart = false;
  std::vector<int32_t> bucket_of{};  // each parameter
};

struct Settings {
  std::string rule = "onebit_adam";
  std::map<std::string, double> hyper = {{"freeze_step", 3}, {"eps", 1e-3}};
  at::ScalarType type = at::kFloat;
  int micro_steps = 1;
  float max_norm = 0, loss_scale = 1;
};

at::Tensor flat(const at::Tensor& values) {
  return values.detach().reshape({-1}).to(at::kDouble, false, /*copy=*/true);
}

class SignRun {
 public:
  SignRun(const Program& program, const Settings& settings, const comm::ProcessMeshPtr& mesh)
      : settings_(settings), rank_(program, settings.type, small_options(0), mesh, settings.rule) {
    inputs_ = rank_.inputs(settings.max_norm, false, 0.01);
    inputs_.loss_scale = settings.loss_scale;
    for (size_t i = 0; i < rank_.rule.hyper.size(); ++i)
      if (const auto found = settings.hyper.find(rank_.rule.hyper[i].name); found != settings.hyper.end())
        inputs_.hyper[0][i] = found->second;
    rank_.engine->expect(inputs_);
  }

  Step step(int number) {
    Step made;
    made.grads = gradients(number);
    made.before = state();
    rank_.accumulate(number, inputs_, settings_.micro_steps);
    made.local = rank_.engine->grads().local();
    made.report = rank_.engine->step(inputs_);
    made.after = state();
    made.apart = exchanges().apart();
    made.bucket_of = rank_.engine->params().spaces()[0].map.bucket_of;
    return made;
  }

  State state() {
    State found;
    Engine& engine = *rank_.engine;
    for (size_t i = 0; i < rank_.weights.size(); ++i) {
      found.of["weight"].push_back(flat(engine.states().full(StateKind::kMaster, 0, i)));
      for (size_t slot = 0; slot < rank_.rule.slots.size(); ++slot)
        found.of[rank_.rule.slots[slot]].push_back(
            flat(engine.states().full(StateKind::kSlot, static_cast<int>(slot), i)));
      const auto [error, owned] = exchanges().errors(i);
      const int64_t numel = rank_.weights[i].numel();
      found.of["error"].push_back(error.defined() ? flat(error) : at::zeros({numel}, at::kDouble));
      found.of["owned"].push_back(owned.defined() ? flat(owned) : at::zeros({numel + 8}, at::kDouble));
    }
    for (size_t i = 0; i < rank_.weights.size(); ++i) {
      const std::vector<Buffer>& beside = exchanges().beside(engine.params().space_of(i));
      if (beside.size() != 2) continue;
      found.of["changed"].push_back(flat(engine.params().view(i, beside[0])));
      found.of["common"].push_back(flat(engine.params().view(i, beside[1])));
    }
    for (const auto& [name, numbers] : engine.stepper().sums().kept())
      for (const double number : numbers) found.of[name].push_back(at::full({1}, number, at::kDouble));
    return found;
  }

  CompressedStep& exchanges() { return rank_.engine->stepper().compressed(); }
  TrainingRank& rank() { return rank_; }
  StepInputs& inputs() { return inputs_; }

 private:
  // The sum over micro-steps, as plain autograd has it, in the weights' type.
  Tensors gradients(int number) {
    Tensors weights, grads;
    for (const at::Tensor& weight : rank_.weights) {
      weights.push_back(weight.detach().clone().set_requires_grad(true));
      grads.push_back(at::Tensor());
    }
    for (int part = 0; part < settings_.micro_steps; ++part)
      (rank_.program.loss(weights, number, rank_.rank, part) / settings_.micro_steps).backward();
    for (size_t i = 0; i < weights.size(); ++i)
      if (weights[i].grad().defined()) grads[i] = flat(weights[i].grad());
    return grads;
  }

  const Settings settings_;
  TrainingRank rank_;
  StepInputs inputs_;
};

std::vector<std::vector<Step>> runs_of(const Program& program, const Settings& settings, int world, int steps) {
  return train_on<std::vector<Step>>(world, [&](const comm::ProcessMeshPtr& mesh) {
    SignRun run(program, settings, mesh);
    std::vector<Step> made;
    for (int number = 0; number < steps; ++number) made.push_back(run.step(number));
    return made;
  });
}

// Every rank uses every weight at first. Later weight 1 is used by no rank in step 5, and weight 3 by the first one
// alone.
Program program_of(int count, int unused_step = 5) {
  Program made;
  for (int i = 0; i < count; ++i) made.begin.push_back(values(i, {4 + i, 3}));
  made.loss = [=](const std::vector<at::Tensor>& weights, int step, int rank, int part) {
    at::Tensor loss = at::zeros({});
    for (int i = 0; i < count; ++i)
      if (!(i == 1 && step == unused_step) && !(i == 3 && rank > 0 && step > 1))
        loss = loss + loss_of(weights[i], 100 * step + 10 * rank + part + i);
    return loss;
  };
  return made;
}

// ---- the model ----------------------------------------------------------------------------------------------------

// eps is so large that an element of which gradients of ranks cancel each other does not divide by their rounding.
struct Hyper {
  double lr = 0.01, beta1 = 0.9, beta2 = 0.999, eps = 1e-3, decay = 0;
};

// One step of all ranks, of the parameters of which some rank has a gradient.
struct Model {
  const std::vector<const Step*> ranks;
  const Settings& settings;
  std::vector<size_t> used{};
  std::vector<Tensors> grads{};  // clipped; of each rank and used parameter

  Model(std::vector<const Step*> of, const Settings& given, double norm_bound) : ranks(std::move(of)), settings(given) {
    for (size_t param = 0; param < ranks[0]->grads.size(); ++param)
      if (std::any_of(ranks.begin(), ranks.end(), [&](const Step* one) { return one->grads[param].defined(); }))
        used.push_back(param);
    double squares = 0;
    for (const Step* one : ranks) {
      grads.emplace_back();
      for (size_t param : used) {
        const at::Tensor& grad = one->grads[param];
        grads.back().push_back(grad.defined() ? grad : at::zeros_like((*one).before("weight", param)));
        squares += grads.back().back().square().sum().item<double>();
      }
    }
    if (!ranks[0]->local) {
      squares = 0;
      for (size_t i = 0; i < used.size(); ++i) {
        at::Tensor mean = at::zeros_like(grads[0][i]);
        for (const Tensors& one : grads) mean = mean + one[i] / static_cast<double>(ranks.size());
        for (Tensors& one : grads) one[i] = mean;
        squares += mean.square().sum().item<double>();
      }
    } else {
      squares /= static_cast<double>(ranks.size());
    }
    norm = std::sqrt(squares);
    for (const Step* one : ranks) EXPECT_NEAR(one->report.norm, norm, norm_bound * norm);
    const double factor = given.max_norm > 0 ? std::min(1.0, given.max_norm / (norm + 1e-6)) : 1.0;
    for (Tensors& of_rank : grads)
      for (at::Tensor& one : of_rank) one = one * factor;
  }

  double norm = 0;

  std::vector<Tensors> of(const char* name) const {
    std::vector<Tensors> found;
    for (const Step* one : ranks) {
      found.emplace_back();
      for (size_t param : used) found.back().push_back(one->before(name, param).clone());
    }
    return found;
  }
  void check(const char* name, size_t rank, size_t i, const at::Tensor& expected, double bound) const {
    const at::Tensor& found = ranks[rank]->after(name, used[i]);
    EXPECT_LE(largest_difference(found.narrow(0, 0, expected.numel()), expected),
              bound * (1 + expected.abs().max().item<double>()))
        << name << " of parameter " << used[i] << " on rank " << rank << " of " << ranks.size();
  }
};

double bound_of(const Settings& settings) {
  return settings.type == at::kFloat ? 1e-6 : settings.type == at::kHalf ? 2e-3 : 2e-2;
}

void check_adam_step(const Model& model, bool frozen, const Settings& settings) {
  const Hyper h;
  const auto m = model.of("exp_avg"), v = model.of("exp_avg_sq"), weights = model.of("weight");
  const auto error = model.of("error"), owned = model.of("owned");
  std::vector<Tensors> sent(m.size());
  for (size_t rank = 0; rank < m.size(); ++rank)
    for (size_t i = 0; i < model.used.size(); ++i)
      sent[rank].push_back(m[rank][i] * h.beta1 + model.grads[rank][i] * (1 - h.beta1));
  const Tensors mean = frozen ? comm::mean_of_signs(sent, error, owned, false) : sent[0];
  for (size_t rank = 0; rank < m.size(); ++rank) {
    for (size_t i = 0; i < model.used.size(); ++i) {
      const at::Tensor variance =
          frozen ? v[rank][i] : v[rank][i] * h.beta2 + model.grads[rank][i].square() * (1 - h.beta2);
      const double bound = bound_of(settings);
      // A step divides by a root that a rounded gradient moves: where v is new, an update is lr times a sign.
      const at::Tensor next = weights[rank][i] - h.lr * mean[i] / (variance.sqrt() + h.eps);
      model.check("exp_avg", rank, i, mean[i], bound);
      model.check("exp_avg_sq", rank, i, variance, bound);
      model.check("weight", rank, i, next, bound);
      model.check("error", rank, i, error[rank][i], bound);
      const int64_t slice = plan::slice_numel(weights[rank][i].numel(), static_cast<int64_t>(m.size()));
      model.check("owned", rank, i, owned[rank][i].narrow(0, 0, slice), bound);
    }
  }
}

std::vector<const Step*> of_all(const std::vector<std::vector<Step>>& runs, size_t step) {
  std::vector<const Step*> found;
  for (const auto& one : runs) found.push_back(&one[step]);
  return found;
}

void expect_equal_bits(const std::vector<const Step*>& ranks, const char* name) {
  for (const Step* one : ranks)
    for (size_t param = 0; param < one->grads.size(); ++param)
      EXPECT_TRUE(at::equal(one->after(name, param), ranks[0]->after(name, param))) << name << " " << param;
}

TEST(CompressedStepTest, OneBitAdamEqualsAModelOfAllRanks) {
  for (int world = 1; world <= 8; ++world) {
    Settings settings;
    settings.max_norm = world % 2 == 0 ? 0.5f : 0.0f;
    settings.micro_steps = world % 3 == 0 ? 2 : 1;
    const auto runs = runs_of(program_of(5), settings, world, 7);
    for (size_t step = 0; step < 7; ++step) {
      const auto ranks = of_all(runs, step);
      const bool frozen = step >= 3;
      for (const Step* one : ranks) EXPECT_EQ(one->local, frozen) << step;
      check_adam_step(Model(ranks, settings, 1e-5), frozen, settings);
      expect_equal_bits(ranks, "weight");
      expect_equal_bits(ranks, "exp_avg");
    }
  }
}

TEST(CompressedStepTest, UntilTheFreezeItIsAdamBitForBit) {
  Settings settings;
  const auto runs = runs_of(program_of(5), settings, 2, 3);
  const auto plain = train_on(2, [&](const comm::ProcessMeshPtr& mesh) {
    TrainingRank rank(program_of(5), at::kFloat, small_options(0), mesh, "adam");
    StepInputs inputs = rank.inputs(0, false, 0.01);
    for (size_t i = 0; i < rank.rule.hyper.size(); ++i) {
      if (rank.rule.hyper[i].name == "bias_correction") inputs.hyper[0][i] = 0;
      if (rank.rule.hyper[i].name == "eps") inputs.hyper[0][i] = 1e-3;
    }
    for (int step = 0; step < 3; ++step) rank.step(step, inputs);
    return rank.finish();
  });
  for (size_t param = 0; param < 5; ++param)
    EXPECT_TRUE(at::equal(runs[0][2].after("weight", param), flat(plain[0].masters[param]))) << param;
}

TEST(CompressedStepTest, SixteenBitsWithALossScale) {
  for (at::ScalarType type : {at::kHalf, at::kBFloat16}) {
    Settings settings;
    settings.type = type;
    settings.loss_scale = type == at::kHalf ? 64.0f : 1.0f;
    const auto runs = runs_of(program_of(4), settings, 3, 6);
    for (size_t step = 0; step < 6; ++step) {
      expect_equal_bits(of_all(runs, step), "weight");
      EXPECT_EQ(runs[0][step].local, step >= 3);
      EXPECT_FALSE(runs[0][step].report.skipped);
    }
  }
}

TEST(CompressedStepTest, ANanOnOneRankChangesNothingOnAnyRank) {
  Settings settings;
  Program program = program_of(3);
  const auto plain = program.loss;
  program.loss = [=](const std::vector<at::Tensor>& weights, int step, int rank, int part) {
    const at::Tensor loss = plain(weights, step, rank, part);
    return step == 4 && rank == 1 ? loss * NAN : loss;
  };
  const auto runs = runs_of(program, settings, 3, 6);
  for (const auto& run : runs) {
    EXPECT_TRUE(run[4].report.skipped);
    EXPECT_FALSE(run[3].report.skipped || run[5].report.skipped);
    for (const auto& [name, values] : run[4].before.of)
      for (size_t param = 0; param < values.size(); ++param)
        EXPECT_TRUE(at::equal(values[param], run[4].after.of.at(name)[param])) << name << " " << param;
  }
}

TEST(CompressedStepTest, AMaskKeepsMomentumZero) {
  const auto found = train_on<at::Tensor>(2, [&](const comm::ProcessMeshPtr& mesh) {
    SignRun run(program_of(3), Settings{}, mesh);
    at::Tensor mask = at::ones({6, 3});
    mask.select(0, 2).zero_();
    run.exchanges().set_mask(2, mask);
    for (int step = 0; step < 6; ++step) run.step(step);
    const std::string said = error_of([&] { run.exchanges().set_mask(1, mask); });
    EXPECT_NE(said.find("exp_avg_mask of parameter \"w1\""), std::string::npos) << said;
    return run.state()("exp_avg", 2).clone();
  });
  EXPECT_TRUE(at::equal(found[0].reshape({6, 3}).select(0, 2), at::zeros({3}, at::kDouble)));
  EXPECT_GT(found[0].reshape({6, 3}).select(0, 1).abs().min().item<double>(), 0);
}

TEST(CompressedStepTest, TwoMessagesForEachBucketAndOneNumber) {
  const auto traffic = train_on<std::vector<comm::Traffic>>(4, [&](const comm::ProcessMeshPtr& mesh) {
    SignRun run(program_of(5), Settings{}, mesh);
    std::vector<comm::Traffic> found;
    for (int step = 0; step < 5; ++step) {
      comm::Communicator& ranks = *run.rank().engine->params().everyone().replicas;
      ranks.reset_traffic();
      run.step(step);
      found.push_back(ranks.traffic());
    }
    const auto buckets = static_cast<int64_t>(run.rank().engine->params().spaces()[0].map.buckets.size());
    // Flags, and the mean square of the norms.
    EXPECT_EQ(found[3].calls, 2 * buckets + 2);
    EXPECT_EQ(found[0].calls, buckets + 1);
    return found;
  });
}

TEST(CompressedStepTest, WhatItCannotDoIsRefused) {
  const auto said = [](int stage) {
    return error_of([&] {
      const auto engine = engine_of(specs_of({at::ones({8}).set_requires_grad(true)}), small_options(stage));
      engine->set_rules({&optim::find_rule("onebit_adam")});
    });
  };
  EXPECT_NE(said(1).find("\"zero_optimization.stage\" to 0"), std::string::npos) << said(1);
  EXPECT_EQ(said(0), "no error");
  const std::string mixed = error_of([&] {
    const auto engine = engine_of(
        specs_of({at::ones({8}).set_requires_grad(true), at::ones({8}).set_requires_grad(true)}, 2), small_options(0));
    engine->set_rules({&optim::find_rule("onebit_adam"), &optim::find_rule("adam")});
  });
  EXPECT_NE(mixed.find("all groups"), std::string::npos) << mixed;
}

// ---- 1-bit LAMB ---------------------------------------------------------------------------------------------------

double norm_of(const at::Tensor& values) { return values.norm().item<double>(); }

double within(double value, double least, double most) { return std::min(std::max(value, least), most); }

void check_lamb_step(const Model& model, size_t step, size_t freeze, const Settings& settings) {
  Hyper h;
  h.decay = settings.hyper.at("weight_decay");
  const auto m = model.of("exp_avg"), v = model.of("exp_avg_sq"), f = model.of("exp_avg_sq_fresh");
  const auto weights = model.of("weight");
  const bool first = step == freeze, frozen = step >= freeze;
  const auto number = [&](const char* name, size_t i) {
    if (model.ranks[0]->before.of.count(name) == 0) return name == std::string("lamb_coeff_freeze") ? 0.0 : 1.0;
    return model.ranks[0]->before(name, model.used[i]).item<double>();
  };
  std::vector<double> scaling;
  double mean_size = 0;
  for (size_t i = 0; i < model.used.size(); ++i)
    mean_size += norm_of(m[0][i]) / std::sqrt(m[0][i].numel()) / static_cast<double>(model.used.size());
  for (size_t i = 0; i < model.used.size(); ++i)
    scaling.push_back(first ? mean_size / (norm_of(m[0][i]) / std::sqrt(m[0][i].numel())) : number("scaling_coeff", i));
  Tensors received(model.used.size());
  if (frozen) {
    const auto error = model.of("error"), owned = model.of("owned");
    for (size_t begin = 0, end; begin < model.used.size(); begin = end) {
      const auto bucket = [&](size_t i) { return model.ranks[0]->bucket_of[model.used[i]]; };
      for (end = begin; end < model.used.size() && bucket(end) == bucket(begin);) ++end;
      std::vector<Tensors> sent(m.size()), errors(m.size()), owners(m.size());
      for (size_t rank = 0; rank < m.size(); ++rank) {
        for (size_t i = begin; i < end; ++i) {
          sent[rank].push_back((m[rank][i] * h.beta1 + model.grads[rank][i] * (1 - h.beta1)) * scaling[i]);
          errors[rank].push_back(error[rank][i]);
          owners[rank].push_back(owned[rank][i]);
        }
      }
      const Tensors mean = comm::mean_of_signs(sent, errors, owners, true);
      for (size_t i = begin; i < end; ++i) received[i] = mean[i - begin] / scaling[i];
    }
  }
  for (size_t rank = 0; rank < m.size(); ++rank) {
    for (size_t i = 0; i < model.used.size(); ++i) {
      const at::Tensor& grad = model.grads[rank][i];
      const at::Tensor moment = frozen ? received[i] : m[rank][i] * h.beta1 + grad * (1 - h.beta1);
      const at::Tensor variance = frozen ? v[rank][i] : v[rank][i] * h.beta2 + grad.square() * (1 - h.beta2);
      const at::Tensor along = moment / (variance.sqrt() + h.eps), update = along + h.decay * weights[rank][i];
      double ratio = within(norm_of(weights[rank][i]) / norm_of(update), 0.01, 10);
      if (!frozen)
        model.check("lamb_coeff_freeze", rank, i,
                    at::full({1}, number("lamb_coeff_freeze", i) * 0.9 + 0.1 * ratio, at::kDouble), 1e-5);
      if (frozen) {
        const at::Tensor rebuilt = (moment - h.beta1 * m[rank][i]) / (1 - h.beta1);
        const at::Tensor fresh = (first ? v[rank][i] : f[rank][i]) * h.beta2 + rebuilt.square() * (1 - h.beta2);
        double factor = ((variance.sqrt() + h.eps) / (fresh.sqrt() + h.eps)).max().item<double>();
        const double share = std::min(1.0, norm_of(along) / norm_of(update)), last = number("last_factor", i);
        factor = within(within(factor * share + 1 - share, 0.5, 4), last * 0.9, last * 1.1);
        ratio = number("lamb_coeff_freeze", i) * factor;
        model.check("exp_avg_sq_fresh", rank, i, fresh, 1e-5);
        model.check("last_factor", rank, i, at::full({1}, factor, at::kDouble), 1e-4);
        model.check("scaling_coeff", rank, i, at::full({1}, scaling[i], at::kDouble), 1e-5);
      }
      model.check("exp_avg", rank, i, moment, 1e-6);
      model.check("exp_avg_sq", rank, i, variance, 1e-6);
      model.check("weight", rank, i, weights[rank][i] - h.lr * ratio * update, 2e-6);
    }
  }
}

TEST(CompressedStepTest, OneBitLambEqualsAModelOfAllRanks) {
  for (int world : {1, 2, 3, 5}) {
    Settings settings;
    settings.rule = "onebit_lamb";
    settings.hyper = {{"freeze_step", 3}, {"eps", 1e-3}, {"weight_decay", world % 2 == 0 ? 0.1 : 0.0}};
    settings.max_norm = world == 3 ? 0.5f : 0.0f;
    const auto runs = runs_of(program_of(5), settings, world, 8);
    for (size_t step = 0; step < 8; ++step) {
      const auto ranks = of_all(runs, step);
      check_lamb_step(Model(ranks, settings, 1e-5), step, 3, settings);
      for (const char* name : {"weight", "exp_avg", "exp_avg_sq_fresh"}) expect_equal_bits(ranks, name);
    }
  }
}

// ---- 0/1 Adam -----------------------------------------------------------------------------------------------------

TEST(CompressedStepTest, ZeroOneAdamEqualsAModelOfAllRanks) {
  for (int world : {1, 2, 3, 5}) {
    Settings settings;
    settings.rule = "zero_one_adam";
    settings.hyper = {{"var_freeze_step", 4},
                      {"eps", 1e-3},
                      {"var_update_scaler", 2},
                      {"local_step_scaler", 2},
                      {"local_step_clipper", 4}};
    const int steps = 16;
    const auto runs = runs_of(program_of(4, /*unused_step=*/-1), settings, world, steps);
    const Hyper h;
    double lr_sum = 0;
    for (int step = 0; step < steps; ++step) {
      const auto ranks = of_all(runs, step);
      const Model model(ranks, settings, 1e-5);
      const int local = step + 1 - 4;
      const bool variance = local <= 0 && step + 1 != 3,
                 sync = local == 1 || local == 2 || local == 4 || local == 8 || local == 12;
      EXPECT_EQ(ranks[0]->local, !variance) << step;
      EXPECT_EQ(ranks[0]->apart, local > 0 && !sync) << step;
      const auto m = model.of("exp_avg"), v = model.of("exp_avg_sq"), weights = model.of("weight");
      auto error = model.of("error"), owned = model.of("owned");
      if (local == 1)
        for (auto* kept : {&error, &owned})
          for (Tensors& of_rank : *kept)
            for (at::Tensor& one : of_rank) one.zero_();
      if (local <= 0) {
        const Tensors mean = variance ? model.grads[0] : comm::mean_of_signs(model.grads, error, owned, false);
        for (int rank = 0; rank < world; ++rank) {
          for (size_t i = 0; i < model.used.size(); ++i) {
            const at::Tensor moment = m[rank][i] * h.beta1 + mean[i] * (1 - h.beta1);
            const at::Tensor square = variance ? v[rank][i] * h.beta2 + mean[i].square() * (1 - h.beta2) : v[rank][i];
            model.check("exp_avg", rank, i, moment, 1e-6);
            model.check("exp_avg_sq", rank, i, square, 1e-6);
            model.check("weight", rank, i, weights[rank][i] - h.lr * moment / (square.sqrt() + h.eps), 1e-6);
          }
        }
      } else {
        lr_sum += h.lr;
        std::vector<Tensors> sent(world), moments(world), next(world);
        for (int rank = 0; rank < world; ++rank) {
          for (size_t i = 0; i < model.used.size(); ++i) {
            moments[rank].push_back(m[rank][i] * h.beta1 + model.grads[rank][i] * (1 - h.beta1));
            const at::Tensor change = h.lr * moments[rank][i] / (v[rank][i].sqrt() + h.eps);
            next[rank].push_back(weights[rank][i] - change);
            const at::Tensor before =
                local == 1 ? at::zeros_like(change) : ranks[rank]->before("changed", model.used[i]);
            const at::Tensor sum = before - change;
            if (!sync) model.check("changed", rank, i, sum, 1e-6);
            sent[rank].push_back(sum * (v[rank][i].sqrt() + h.eps));
          }
        }
        const Tensors mean = sync ? comm::mean_of_signs(sent, error, owned, false) : Tensors();
        for (int rank = 0; rank < world; ++rank) {
          for (size_t i = 0; i < model.used.size(); ++i) {
            if (sync) {
              const char* const common = local == 1 ? "weight" : "common";
              moments[rank][i] = -mean[i] / lr_sum;
              next[rank][i] = ranks[rank]->before(common, model.used[i]) + mean[i] / (v[rank][i].sqrt() + h.eps);
            }
            model.check("exp_avg", rank, i, moments[rank][i], 2e-6);
            model.check("exp_avg_sq", rank, i, v[rank][i], 0);
            model.check("weight", rank, i, next[rank][i], 2e-6);
          }
        }
        if (sync) lr_sum = 0;
        if (sync) expect_equal_bits(ranks, "weight");
        if (sync) expect_equal_bits(ranks, "exp_avg");
      }
    }
  }
}

TEST(CompressedStepTest, ALocalStepNeedsAGradientOfEachParameter) {
  Settings settings;
  settings.rule = "zero_one_adam";
  settings.hyper = {{"var_freeze_step", 4}};
  const auto said = train_on<std::string>(2, [&](const comm::ProcessMeshPtr& mesh) {
    SignRun run(program_of(3), settings, mesh);
    for (int step = 0; step < 5; ++step) run.step(step);
    return error_of([&] { run.step(5); });
  });
  for (const std::string& one : said) EXPECT_NE(one.find("parameter \"w1\" has none"), std::string::npos) << one;
}

TEST(CompressedStepTest, BetweenSyncsOneNumberAndFlagsTravelAndCommonWeightsCanBeShown) {
  Settings settings;
  settings.rule = "zero_one_adam";
  settings.hyper = {
      {"var_freeze_step", 2}, {"var_update_scaler", 2}, {"local_step_scaler", 1}, {"local_step_clipper", 4}};
  const auto shown = train_on<std::vector<State>>(2, [&](const comm::ProcessMeshPtr& mesh) {
    SignRun run(program_of(3), settings, mesh);
    comm::Communicator& ranks = *run.rank().engine->params().everyone().replicas;
    std::vector<State> found;
    for (int step = 0; step < 5; ++step) {  // local steps 1 to 3; syncs at 1 and 3
      ranks.reset_traffic();
      const Step made = run.step(step);
      if (step == 2) found.push_back(made.after);
      if (step != 3) continue;
      EXPECT_TRUE(made.apart);
      EXPECT_EQ(ranks.traffic().calls, 2);
      run.exchanges().show_common(true);
      found.push_back(run.state());
      run.exchanges().show_common(false);
      for (size_t param = 0; param < 3; ++param)
        EXPECT_TRUE(at::equal(run.state()("weight", param), made.after("weight", param)));
    }
    return found;
  });
  for (const auto& found : shown)
    for (size_t param = 0; param < 3; ++param) {
      EXPECT_TRUE(at::equal(found[1]("weight", param), shown[0][0]("weight", param)));
      EXPECT_TRUE(at::equal(found[0]("weight", param), shown[0][0]("weight", param)));
    }
}

}  // namespace
}  // namespace ds::zero
