// The audit: for some steps, what the engine did is done once more without sharding, and compared.
//
// Gradients are caught where autograd hands them over, added up in fp64, and averaged over the ranks by plain
// collectives; norm and AdamW are computed from them in fp64 on whole tensors. The weights that each rank computes with
// are compared with the masters. It costs some forty bytes for each parameter element on every rank, and a few
// whole-model collectives for each step.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "zero/engine.h"

namespace ds::zero {

struct AuditedGroup {
  std::string rule;
  std::map<std::string, double> hyper;
  double magnification;  // how many times larger a relative difference between gradients may be between updates
};

struct AuditedStep {
  int64_t number;  // for messages
  double loss_scale, clip;
  bool average;                      // gradients are means over the ranks, not sums
  std::vector<AuditedGroup> groups;  // empty: the optimizer lives outside, and its updates are not recomputed
};

using States = std::map<std::string, at::Tensor>;

class Audit {
 public:
  // `ranks`: those that train the same model on other data; null: this one alone. `tolerance`: of relative differences.
  // `update`: what a rule other than "adam" makes of a whole weight. Holds no engine.
  using Update = std::function<at::Tensor(int32_t group, const at::Tensor& weight, const at::Tensor& grad,
                                          const States& states, double step)>;
  Audit(const std::shared_ptr<Engine>& engine, comm::CommunicatorPtr ranks, int rank, double tolerance, Update update);

  void add(size_t param, const at::Tensor& grad);              // autograd has this gradient for the parameter
  void forget() { sums_.assign(sums_.size(), at::Tensor()); }  // gradients have been thrown away
  // Around a step; every rank calls both. before: gradients are reduced, nothing has been updated. after: with the norm
  // that the engine has found, or nan where it is of more than these ranks have. Any difference fails on every rank and
  // names the parameter, the rank and the figures.
  void before_step(AuditedStep step);
  void after_step(bool stepped, double norm);

 private:
  struct Before {
    at::Tensor weight, grad;  // fp64; no gradient: undefined
    States states;
    double count = 0;  // updates so far
  };

  Engine& engine() const;
  void average_gradients();
  at::Tensor master(size_t param) const;
  at::Tensor updated(size_t param) const;
  void compare(const std::string& what, size_t param, const at::Tensor& mine, const at::Tensor& reference,
               double scale = 0) const;
  void check_weights() const;
  const AuditedGroup& group(size_t param) const;
  [[noreturn]] void fail_step(const std::string& text) const;

  const std::weak_ptr<Engine> engine_;
  const comm::CommunicatorPtr ranks_;
  const int rank_;
  const double tolerance_;
  const Update update_;
  AuditedStep step_{};
  std::vector<at::Tensor> sums_;  // of each parameter, fp64, on this rank
  std::vector<Before> before_;
  double norm_ = 0;
};

}  // namespace ds::zero
