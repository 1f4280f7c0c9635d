// The optimizer step over the flat buffers: one norm, then one fused pass of unscale, clip, update and cast.
#pragma once
#include <cstdint>
#include <vector>

#include "optim/rule.h"
#include "zero/device_context.h"
#include "zero/gradients/grad_reducer.h"
#include "zero/step/compressed_step.h"
#include "zero/step/norm_sums.h"
#include "zero/step/parameter_sums.h"
#include "zero/spaces/param_store.h"
#include "zero/step/step.h"
#include "zero/step/step_gather.h"
#include "zero/step/step_memory.h"
#include "zero/step/strategies/step_strategy.h"
#include "zero/step/update_runs.h"

namespace ds::zero {

class Stepper {
 public:
  Stepper(ParamStore& store, DeviceContext& device, GatherOptions gather);

  // Computes norm, clipping factor and finiteness on the device. max_norm <= 0: no clipping. check: not finite means
  // skip. Where each rank has gradients of its own, see [Note: one decision].
  void norm(const GradReducer& grads, float loss_scale, float max_norm, bool check);

  // Sets the native optimizer of each parameter group, and with it the slots. Called before anything about slots.
  void set_rules(std::vector<const optim::Rule*> by_group);
  const optim::Rule& rule(int32_t group) const { return *rules_.at(group); }
  // Updates go on beside the training: the end of a step does not wait until masters and states are at rest.
  void set_beside(bool beside) { beside_ = beside; }
  // One update of `parts` of all groups by their rules, with hyperparameters (of each group) in the rule's order; does
  // nothing on the device when norm() said skip. After norm().
  void update(const GradReducer& grads, const std::vector<UpdatePart>& parts,
              const std::vector<std::vector<double>>& hyper);
  // After norm() and update(); a skipped step has counted nowhere. Fails on every rank where one has failed before the
  // update, which then has touched nothing on any of them; the gradients are still there.
  StepReport report();

  // For an optimizer that runs elsewhere: the factor that unscales and clips; gradients of the masters' type multiplied
  // by it in place; then masters cast to lp.
  float grad_scale() { return device_.read_step_scale().grad_scale; }
  void scale_grads(const GradReducer& grads);
  void publish();         // lp = master, on every rank
  void gather();          // all-gathers lp, where each rank has a shard
  void refresh_master();  // master = lp, after a write to the model's weights

  void ensure_slots(ParamSpace& space);  // makes the states of the space's rule, where they do not exist

  // Names of the slots of all rules, each once; what is called a slot's number is its position here.
  const std::vector<std::string>& slot_names() const { return slot_names_; }
  // The buffer of a slot, zero at first; null where the group's rule has no such slot.
  const Buffer* slot(ParamSpace& space, int slot);
  const at::Tensor& steps() const { return steps_; }  // float, one per parameter, on the CPU: updates it has seen
  ParameterSums& sums() { return sums_; }
  CompressedStep& compressed() { return compressed_; }

 private:
  // fp32 numbers for elements of the shard space from `origin` on.
  struct Scratch {
    at::Tensor data;
    int64_t origin = 0;
  };
  // The work of an update in one space.
  struct Turn {
    ParamSpace& space;
    const optim::Rule& rule;
    const std::vector<optim::Pass>& passes;  // of this step
    const std::vector<double>& hyper;
    const std::vector<UpdatePart>& parts;
    Scratch scratch;
  };

  void prepare();
  void share_failure();
  void sum_squares(const ParamSpace& space, const GradReducer& grads, const at::Tensor& sum);
  // Pass number `pass` over one bucket, or over all of them (-1).
  void run_pass(const Turn& turn, const GradReducer& grads, size_t pass, int32_t bucket = -1);
  void run_pass(const Turn& turn, const UpdatePart& part, const GradReducer& grads, size_t pass, int32_t bucket);
  void count_steps(const std::vector<UpdatePart>& parts, const GradReducer& grads);
  void last_pass(const Turn& turn, const GradReducer& grads);
  // All passes of a rule that orthogonalises, bucket by bucket: its scratch is no larger than one.
  void matrix_passes(Turn turn, const GradReducer& grads);
  // Passes number `pass` and the next one, bucket by bucket, with an exchange of signs between them.
  void exchange_passes(Turn turn, const GradReducer& grads, size_t pass);

  ParamStore& store_;
  DeviceContext& device_;
  StepMemory memory_;
  StepGather gather_;
  CompressedStep compressed_;
  ParameterSums sums_;
  std::vector<const optim::Rule*> rules_;  // of each group; empty: the optimizer runs elsewhere
  std::vector<std::string> slot_names_;
  bool beside_ = false;
  at::Tensor steps_;
  std::vector<at::Tensor> scratch_;  // of each space, from norm() to update(): the scratch of its rule
  NormSums squares_;
  std::vector<float*> stepped_;  // counts that have risen since norm(), to be taken back when skipped
};

}  // namespace ds::zero
