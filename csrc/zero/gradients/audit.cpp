#include "zero/gradients/audit.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/error.h"

namespace ds::zero {

namespace {

std::string number(double value, const char* format) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

double norm_of(const at::Tensor& tensor) { return tensor.norm().item<double>(); }

// Kingma and Ba, "Adam" (2015), algorithm 1; Loshchilov and Hutter, "Decoupled Weight Decay" (2019).
at::Tensor adam(at::Tensor weight, at::Tensor grad, const States& states, const std::map<std::string, double>& hyper,
                double step) {
  const double lr = hyper.at("lr"), decay = hyper.at("weight_decay"), beta1 = hyper.at("beta1"),
               beta2 = hyper.at("beta2"), eps = hyper.at("eps");
  const bool decoupled = hyper.at("decoupled") != 0, corrects = hyper.at("bias_correction") != 0;
  if (!decoupled) grad = grad + weight * decay;
  at::Tensor first = states.at("exp_avg") * beta1 + grad * (1 - beta1);
  at::Tensor second = states.at("exp_avg_sq") * beta2 + grad * grad * (1 - beta2);
  if (corrects) {
    first = first / (1 - std::pow(beta1, step));
    second = second / (1 - std::pow(beta2, step));
  }
  if (decoupled) weight = weight * (1 - lr * decay);
  return weight - first * lr / (second.sqrt() + eps);
}

}  // namespace

Audit::Audit(const std::shared_ptr<Engine>& engine, comm::CommunicatorPtr ranks, int rank, double tolerance,
             Update update)
    : engine_(engine),
      ranks_(std::move(ranks)),
      rank_(rank),
      tolerance_(tolerance),
      update_(std::move(update)),
      sums_(engine->params().size()) {}

Engine& Audit::engine() const {
  const auto alive = engine_.lock();
  if (!alive) fail(ErrorKind::kRuntime, "the engine that is audited has ended");
  return *alive;  // its step makes this call
}

void Audit::fail_step(const std::string& text) const {
  fail(ErrorKind::kRuntime, "[Rank ", rank_, "] audit of step ", step_.number, ": ", text);
}

const AuditedGroup& Audit::group(size_t param) const {
  return step_.groups.at(static_cast<size_t>(engine().params().spec(param).group));
}

void Audit::add(size_t param, const at::Tensor& grad) {
  at::NoGradGuard no_grad;
  const at::Tensor whole = (grad.is_sparse() ? grad.to_dense() : grad).detach().to(at::kDouble);
  at::Tensor& sum = sums_.at(param);
  if (sum.defined()) {
    sum.add_(whole);
  } else {
    sum = whole.clone();
  }
}

at::Tensor Audit::master(size_t param) const { return engine().states().full(StateKind::kMaster, 0, param); }

// Averages the gradients that any rank has.
void Audit::average_gradients() {
  const ParamStore& params = engine().params();
  if (!ranks_) {
    for (size_t param = 0; param < sums_.size(); ++param) before_[param].grad = sums_[param];
    return;
  }
  const auto add = [&](const at::Tensor& tensor) {
    ranks_->all_reduce(tensor, comm::ReduceOp::kSum, "audit of gradients")->wait();
  };
  const at::Tensor used = at::zeros({static_cast<int64_t>(sums_.size())}, at::kFloat);
  for (size_t param = 0; param < sums_.size(); ++param)
    if (sums_[param].defined()) used[static_cast<int64_t>(param)].fill_(1);
  const at::Tensor shared = used.to(params.device());
  add(shared);
  used.copy_(shared);
  for (size_t param = 0; param < sums_.size(); ++param) {
    if (used.data_ptr<float>()[param] == 0) continue;
    const at::TensorOptions options = at::TensorOptions().device(params.device()).dtype(at::kDouble);
    const at::Tensor whole =
        sums_[param].defined() ? sums_[param].contiguous() : at::zeros(params.spec(param).sizes(), options);
    add(whole);
    before_[param].grad = step_.average ? whole / ranks_->size() : whole;
  }
}

// `mine` against `reference`, relative to the reference's norm (or `scale`).
void Audit::compare(const std::string& what, size_t param, const at::Tensor& mine, const at::Tensor& reference,
                    double scale) const {
  const at::Tensor difference = mine.to(at::kDouble) - reference;
  const double gap = norm_of(difference), size = std::max(scale > 0 ? scale : norm_of(reference), 1e-30);
  if (gap <= tolerance_ * size || (std::isnan(gap) && !at::isfinite(reference).all().item<bool>())) return;
  const auto worst = at::nan_to_num(difference.abs().reshape({-1}), HUGE_VAL).argmax().item<int64_t>();
  const auto value = [&](const at::Tensor& of) { return number(of.reshape({-1})[worst].item<double>(), "%.6g"); };
  fail_step(what + " of parameter '" + engine().params().spec(param).name + "' " + shape_text(reference.sizes()) +
            " differs from the one computed without sharding: relative 2-norm of the difference " +
            number(gap / size, "%.3g") + " (allowed " + number(tolerance_, "%.1g") + "), norms " +
            number(norm_of(mine.to(at::kDouble)), "%.6g") + " and " + number(norm_of(reference), "%.6g") +
            ", largest at element " + std::to_string(worst) + ": " + value(mine) + " instead of " + value(reference));
}

void Audit::before_step(AuditedStep step) {
  at::NoGradGuard no_grad;
  step_ = std::move(step);
  check_weights();
  Engine& core = engine();
  before_.assign(sums_.size(), {});
  average_gradients();
  double squares = 0;
  for (size_t param = 0; param < sums_.size(); ++param) {
    const at::Tensor mine = core.states().full(StateKind::kGrad, 0, param), reference = before_[param].grad;
    if (mine.defined() != reference.defined())
      fail_step("parameter '" + core.params().spec(param).name + "' has " + (mine.defined() ? "a" : "no") +
                " gradient in the engine and " + (reference.defined() ? "one" : "none") + " without sharding");
    if (!mine.defined()) continue;
    compare("the gradient", param, mine, reference);
    squares += reference.square().sum().item<double>();
  }
  norm_ = std::sqrt(squares) / step_.loss_scale;
  for (size_t param = 0; param < sums_.size(); ++param) before_[param].weight = master(param).to(at::kDouble);
  if (step_.groups.empty()) return;
  const std::vector<std::string>& names = core.stepper().slot_names();
  for (size_t param = 0; param < sums_.size(); ++param) {
    for (size_t slot = 0; slot < names.size(); ++slot) {
      const at::Tensor state = core.states().full(StateKind::kSlot, static_cast<int>(slot), param);
      if (state.defined()) before_[param].states[names[slot]] = state.to(at::kDouble);
    }
    before_[param].count = core.stepper().steps().data_ptr<float>()[param];
  }
}

// The weight after one step of the optimizer with the gradient, which is still scaled.
at::Tensor Audit::updated(size_t param) const {
  const Before& before = before_[param];
  const AuditedGroup& group = this->group(param);
  at::Tensor grad = before.grad / step_.loss_scale;
  if (step_.clip > 0) grad = grad * std::min(1.0, step_.clip / (norm_ + 1e-6));
  if (group.rule == "adam") return adam(before.weight, grad, before.states, group.hyper, before.count + 1);
  return update_(engine().params().spec(param).group, before.weight, grad, before.states, before.count + 1);
}

void Audit::after_step(bool stepped, double norm) {
  at::NoGradGuard no_grad;
  const bool finite = std::isfinite(norm_);
  if (finite && !std::isnan(norm) && std::abs(norm - norm_) > std::max(tolerance_ * norm_, 1e-12))
    fail_step("the gradient norm is " + number(norm, "%.8g") + ", without sharding " + number(norm_, "%.8g"));
  for (size_t param = 0; param < sums_.size(); ++param) {
    if (!stepped) {
      compare("after a skipped step the weight", param, master(param), before_[param].weight);
    } else if (!step_.groups.empty() && finite && before_[param].grad.defined()) {
      const at::Tensor expected = updated(param);
      // The change that the rule makes of a difference between gradients, in the step that it adds to the weight.
      const double more = (group(param).magnification - 1) * norm_of(expected - before_[param].weight);
      compare("the updated weight", param, master(param), expected, norm_of(expected) + more);
    }
  }
  check_weights();
  before_.clear();
  forget();
}

// Every rank computes with what the masters say.
void Audit::check_weights() const {
  std::string problem;
  const ParamStore& params = engine().params();
  for (size_t param = 0; param < sums_.size(); ++param) {
    const ParamSpec& spec = params.spec(param);
    at::Tensor whole = master(param);
    if (ranks_ && !params.policy().shards_states()) {
      whole = whole.contiguous();
      ranks_->broadcast(whole, 0, "audit of weights")->wait();
    }
    if (spec.sharded && !spec.sharded->available()) continue;  // fetched when used; its shard was compared
    const at::Tensor mine = spec.tensor.detach(), reference = whole.to(mine.scalar_type());
    if (!problem.empty() || at::equal(mine, reference)) continue;
    const double gap = norm_of(mine.to(at::kDouble) - reference.to(at::kDouble));
    problem = "the weights of parameter '" + spec.name + "' on rank " + std::to_string(rank_) +
              " are not those of the masters: relative 2-norm of the difference " +
              number(gap / std::max(norm_of(reference.to(at::kDouble)), 1e-30), "%.3g") +
              ". They are stale, or were changed without deepspeed.zero.GatheredParameters or "
              "safe_set_full_fp32_param";
  }
  const at::Tensor bad = at::full({1}, problem.empty() ? 0.0 : 1.0, at::TensorOptions().device(params.device()));
  if (ranks_) ranks_->all_reduce(bad, comm::ReduceOp::kSum, "audit of weights")->wait();
  if (!problem.empty()) fail_step(problem);
  if (bad.item<float>() != 0)
    fail_step("another rank computes with weights that are not those of the masters; it names the parameter");
}

}  // namespace ds::zero
