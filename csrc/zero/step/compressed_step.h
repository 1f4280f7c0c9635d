// Steps of optimizers whose ranks exchange signs instead of gradients: [Note: phases] in optim/rule.h.
//
// [Note: one decision]
// With a gradient of its own, each rank would clip and skip by itself. The root mean square of the ranks' norms takes
// the place of the norm of the mean: it is one reduced number, all ranks have it before any of them has changed an
// error, and a NaN on one of them makes all of them skip. These steps skip for every dtype, since a NaN would stay in
// the errors.
//
// [Note: a freeze that decides itself]
// With a freeze_step below 0 the variance is frozen when its norm (the sum of its elements) has changed by less than 4
// % over 1 / (1 - beta2) updates, the rule of the published tutorials. Ranks have the same variance, so they agree.
//
// [Note: weights between two syncs]
// Where a phase is `apart`, each rank has weights of its own after the step. The weights that they have in common are
// those of the last sync, and checkpoints have these: show_common() exchanges the two for as long as one is written.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/compressed/sign_exchange.h"
#include "optim/rule.h"
#include "zero/device_context.h"
#include "zero/spaces/param_store.h"
#include "zero/step/parameter_sums.h"

namespace ds::zero {

// Values of the hyperparameters of each parameter group.
using GroupValues = std::vector<std::vector<double>>;

class CompressedStep {
 public:
  CompressedStep(ParamStore& store, DeviceContext& device) : store_(store), device_(device) {}

  // The rules of all groups, and the number of updates that each parameter has seen. Fails where the engine cannot
  // exchange signs.
  void set_rules(const std::vector<const optim::Rule*>& rules, at::Tensor steps);
  bool active() const { return !rules_.empty(); }
  // The hyperparameters of the next step, as far as they are known.
  void expect(GroupValues hyper);
  // Whether the ranks keep their own gradients for the next step.
  bool local() const;
  // The phase of the next step, of a group; null: its rule has none.
  const optim::Phase* phase(size_t group) const;

  // Before the passes of a step that is made: what they need is there. `local`: of its gradients; `used`: some rank has
  // one. Returns the hyperparameters, with those that the engine knows.
  GroupValues begin(const GroupValues& hyper, bool local, const std::function<bool(size_t param)>& used);
  // After them. Not for a step that was skipped.
  void finish();

  // Buffers of Rule::beside; none if the phase of the space's group has no use for them.
  const std::vector<Buffer>& beside(const ParamSpace& space) const;
  // fp32 memory for what a bucket sends.
  at::Tensor scratch(const plan::Bucket& bucket) const;
  // The part of each used parameter in `row`, of one bucket, becomes the mean over the ranks. Collective.
  void exchange(const ParamSpace& space, const plan::Bucket& bucket, const std::function<bool(size_t param)>& used,
                const at::Tensor& row);
  // Pass::evens_out, of a row of sums for each parameter.
  void even_out(const optim::Rule& rule, const at::Tensor& sums) const;

  // Signs travel among these ranks, which are those of the gradients, and not over the engine's transport.
  void use_ranks(comm::CommunicatorPtr ranks);
  // The factors of a parameter's received values, in its shape. Undefined: none.
  void set_mask(size_t param, const at::Tensor& mask);
  // Whether the ranks have weights of their own.
  bool apart() const { return apart_; }
  // Masters have the weights of the last sync (true), or those of this rank again. The caller publishes them.
  void show_common(bool common);
  // Somebody has written other weights and states: errors, and the buffers of Rule::beside, start anew. `numbers` are
  // counters() of the run that has saved them.
  void restore(const NamedNumbers& numbers);
  NamedNumbers counters() const;
  // Names of parameters without a mask of which a row has no variance, so that signs would move it by themselves.
  std::vector<std::string> zero_variances() const;
  // (what this rank's values have lost, what it has lost as an owner), fp32, of a parameter; undefined: no exchange
  // yet.
  std::pair<at::Tensor, at::Tensor> errors(size_t param) const;

 private:
  // Memory of the exchanges of a space.
  struct Kept {
    Buffer errors;
    at::Tensor owned;                   // the errors of this rank as an owner
    std::vector<int64_t> owned_begins;  // of each parameter of the space
    std::vector<Buffer> beside;
    struct Made {
      std::vector<int32_t> params;
      std::unique_ptr<comm::SignExchange> exchange;
    };
    std::map<int64_t, Made> exchanges{};  // of buckets, by their begin
  };

  int64_t update() const;
  GroupValues known(GroupValues hyper) const;
  void look_at_variance();
  size_t number_of(const ParamSpace& space) const { return static_cast<size_t>(&space - store_.spaces().data()); }
  void need_errors(const ParamSpace& space, Kept& kept) const;
  void need_beside(const ParamSpace& space, Kept& kept) const;

  ParamStore& store_;
  DeviceContext& device_;
  comm::CommunicatorPtr own_ranks_;        // null: the space's
  std::vector<const optim::Rule*> rules_;  // empty: none compresses
  at::Tensor steps_;
  GroupValues given_, hyper_;     // hyper_: with what the engine knows
  std::deque<double> variances_;  // norms of the variance after the last steps, where it decides when it is frozen
  double decided_ = 0;            // the number of updates until then; 0: not yet
  std::vector<double> lr_sums_;   // of each group, since the ranks were last equal
  int period_ = -1;               // of the last step; -1: what is kept starts anew
  bool apart_ = false;
  std::vector<const optim::Phase*> phases_;  // of the step under way, by group
  std::vector<Kept> kept_;                   // by space
  std::map<size_t, at::Tensor> masks_;
};

}  // namespace ds::zero
