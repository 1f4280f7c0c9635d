// The optimizer step over the flat buffers: one norm, then one fused pass of unscale, clip, update and cast.
#pragma once
#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "zero/device_context.h"
#include "zero/grad_reducer.h"
#include "zero/param_store.h"

namespace ds::zero {

struct AdamGroupArgs {
  double lr, beta1, beta2, eps, weight_decay;
  bool adamw, bias_correction;
};

struct StepReport {
  double norm;       // of the unscaled gradients over all ranks
  float grad_scale;  // factor of unscaling and clipping
  bool skipped;      // gradients were not finite, nothing was touched
};

class Stepper {
 public:
  Stepper(ParamStore& store, DeviceContext& device);

  // Computes norm, clipping factor and finiteness on the device. `model_parallel` sums the norm over the ranks that
  // hold other parts of the model; null: none do. max_norm <= 0: no clipping. check: not finite means skip.
  void norm(const GradReducer& grads, float loss_scale, float max_norm, bool check, comm::Communicator* model_parallel);

  // Adam on the used parameters of one group; does nothing on the device when norm() said skip. After norm().
  void adam(const GradReducer& grads, int32_t group, const AdamGroupArgs& args);
  StepReport report();  // after norm() and the adam() of all groups; a skipped step has counted nowhere

  // For an optimizer that runs elsewhere: gradients unscaled and clipped in place, then masters cast to lp.
  void scale_grads(const GradReducer& grads);
  void publish();         // lp = master
  void refresh_master();  // master = lp, after somebody wrote the model's weights

  void ensure_slots(int count);  // optimizer states, zero at first
  at::Tensor slot_view(size_t param, int slot) const;
  const at::Tensor& steps() const { return steps_; }  // float, one per parameter, on the CPU: updates it has seen

 private:
  struct Run {
    int64_t begin, end;
  };
  // Maximal runs of consecutive used parameters that `keep` accepts; padding between them belongs to the run.
  template <typename Keep>
  std::vector<Run> runs(const FlatSpace& space, const GradReducer& grads, Keep keep) const;

  ParamStore& store_;
  DeviceContext& device_;
  at::Tensor steps_;
  std::vector<int32_t> stepped_;  // parameters counted since norm(), to be taken back when skipped
};

}  // namespace ds::zero
