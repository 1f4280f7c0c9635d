// One rank of a small training, by an engine of given options: weights of odd sizes, not all of them always used.
#pragma once
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "small_engine.h"
#include "trained_ranks.h"
#include "zero/engine.h"

namespace ds::zero {

struct TrainedWeights {
  std::vector<at::Tensor> params, masters, slots;
  std::vector<double> norms;
};

struct TrainingRank {
  const comm::CommunicatorPtr ranks;
  const optim::Rule& rule;
  std::vector<at::Tensor> weights;
  std::shared_ptr<Engine> engine;
  TrainedWeights trained;

  // `options`: with the policy of the ZeRO stage. `bucket`: elements of a bucket of gradients.
  TrainingRank(int count, at::ScalarType type, const std::string& rule_name, EngineOptions options, int64_t bucket,
               comm::CommunicatorPtr all)
      : ranks(std::move(all)), rule(optim::find_rule(rule_name)) {
    const bool sharded = options.policy.shards_params();
    std::vector<ParamSpec> specs;
    for (int i = 0; i < count; ++i) {
      weights.push_back(values(i, {4 + i, 3}).to(type).set_requires_grad(true));
      specs.push_back({weights[i], "w" + std::to_string(i), 0, i});
      if (sharded)
        specs[i].sharded = std::make_shared<ShardedParam>(weights[i], specs[i].name, ranks->size(), ranks->rank());
    }
    options.reducer.bucket_numel = bucket;
    options.reducer.predivide = 1.0 / ranks->size();
    options.gatherer.persistence_numel = 13;
    engine = engine_of(specs, options, {ranks});
    engine->set_rules({&rule});
    if (engine->gatherer()) unit_ = engine->gatherer()->add_unit("all", engine->params().sharded_params());
  }

  // Weight 1 is not used in step 1, nor is weight 3 by any but the first rank.
  at::Tensor forward(int step, int part, double factor) {
    ParamGatherer* gatherer = engine->gatherer();
    if (gatherer) gatherer->begin_forward();
    if (gatherer) gatherer->enter(unit_, {});
    at::Tensor loss = at::zeros({});
    for (size_t i = 0; i < weights.size(); ++i) {
      if ((i == 1 && step == 1) || (i == 3 && ranks->rank() > 0)) continue;
      const double seed = 100 * step + 10 * ranks->rank() + part + static_cast<int>(i);
      const at::Tensor x = values(seed, weights[i].sizes()).to(weights[i].scalar_type());
      loss = loss + at::tanh((weights[i] * x).to(at::kFloat)).square().sum();
    }
    loss = loss * factor;
    if (gatherer) gatherer->leave(unit_, {loss});
    if (gatherer) gatherer->end_forward({loss});
    return loss;
  }

  // `last`: of the micro-steps of a step.
  void backward(const at::Tensor& loss, bool last) {
    run_backward(*engine, loss, last || engine->policy().reduce == ReduceAt::kMicroStep);
  }

  std::vector<double> hyper(double lr) const {
    std::vector<double> out;
    for (const auto& one : rule.hyper) out.push_back(one.name == "lr" ? lr : one.fallback);
    return out;
  }

  // The values with which it ends.
  TrainedWeights finish() {
    if (engine->gatherer()) engine->gatherer()->enter(unit_, {});
    for (size_t i = 0; i < weights.size(); ++i) {
      trained.params.push_back(weights[i].detach().clone());
      trained.masters.push_back(engine->states().full(StateKind::kMaster, 0, i));
      for (size_t slot = 0; slot < rule.slots.size(); ++slot)
        trained.slots.push_back(engine->states().full(StateKind::kSlot, static_cast<int>(slot), i));
    }
    return trained;
  }

 private:
  int32_t unit_ = -1;
};

}  // namespace ds::zero
