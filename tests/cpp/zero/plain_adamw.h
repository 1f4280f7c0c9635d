// AdamW in plain tensor arithmetic: what the engine's steps are compared with.
#pragma once
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "zero/engine.h"

namespace ds::zero {

struct AdamArgs {
  double lr, beta1, beta2, eps, weight_decay;

  std::vector<double> hyper() const { return {lr, beta1, beta2, eps, weight_decay, 1, 1}; }
};

inline AdamArgs adam_args() { return {0.01, 0.9, 0.99, 1e-8, 0.1}; }

inline void use_adam(Engine& engine, int groups = 1) {
  engine.stepper().set_rules(std::vector<const optim::Rule*>(groups, &optim::find_rule("adam")));
}

// The inputs of a step where `groups` groups have the same hyperparameters.
inline StepInputs adam_inputs(float max_norm = 0.0f, bool check = false, int groups = 1, AdamArgs args = adam_args()) {
  StepInputs inputs;
  inputs.max_norm = max_norm;
  inputs.check = check;
  inputs.hyper.assign(groups, args.hyper());
  return inputs;
}

// AdamW on whole tensors, as written in the paper; a tensor without a gradient is left alone.
struct PlainAdamW {
  std::vector<at::Tensor> m, v;
  std::vector<int> steps;

  double step(std::vector<at::Tensor>& params, const std::vector<at::Tensor>& grads, double max_norm) {
    at::NoGradGuard no_grad;
    const AdamArgs a = adam_args();
    if (m.empty()) {
      for (const auto& p : params) {
        m.push_back(at::zeros_like(p));
        v.push_back(at::zeros_like(p));
      }
      steps.assign(params.size(), 0);
    }
    double sum = 0;
    for (const auto& g : grads)
      if (g.defined()) sum += g.to(at::kDouble).square().sum().item<double>();
    const double norm = std::sqrt(sum);
    const double clip = max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
    for (size_t i = 0; i < params.size(); ++i) {
      if (!grads[i].defined()) continue;
      const at::Tensor g = grads[i] * clip;
      ++steps[i];
      params[i].mul_(1.0 - a.lr * a.weight_decay);
      m[i] = m[i] * a.beta1 + g * (1 - a.beta1);
      v[i] = v[i] * a.beta2 + g * g * (1 - a.beta2);
      const double c1 = 1 - std::pow(a.beta1, steps[i]), c2 = 1 - std::pow(a.beta2, steps[i]);
      params[i].sub_(m[i] / c1 / (at::sqrt(v[i] / c2) + a.eps) * a.lr);
    }
    return norm;
  }
};

}  // namespace ds::zero
