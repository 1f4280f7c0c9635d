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

struct GatherOptions {
  bool overlap = true;     // gather a bucket's parameters while the next one is stepped
  bool collective = true;  // by all-gather; false: by one broadcast from each owner
};

class Stepper {
 public:
  // `data_parallel` are the ranks that the shards are on.
  Stepper(ParamStore& store, DeviceContext& device, comm::CommunicatorPtr data_parallel, GatherOptions gather);

  // Computes norm, clipping factor and finiteness on the device. `model_parallel` sums the norm over the ranks that
  // hold other parts of the model; null: none do. max_norm <= 0: no clipping. check: not finite means skip.
  void norm(const GradReducer& grads, float loss_scale, float max_norm, bool check, comm::Communicator* model_parallel);

  // Adam on the used parameters of one group; does nothing on the device when norm() said skip. After norm().
  void adam(const GradReducer& grads, int32_t group, const AdamGroupArgs& args);
  StepReport report();  // after norm() and the adam() of all groups; a skipped step has counted nowhere

  // For an optimizer that runs elsewhere: gradients unscaled and clipped in place, then masters cast to lp.
  void scale_grads(const GradReducer& grads);
  void publish();         // lp = master, on every rank
  void refresh_master();  // master = lp, after somebody wrote the model's weights

  void ensure_slots(int count);  // optimizer states, zero at first
  const Buffer& slot(size_t space, int slot) const { return store_.spaces()[space].slots.at(slot); }
  const at::Tensor& steps() const { return steps_; }  // float, one per parameter, on the CPU: updates it has seen

 private:
  struct Run {
    int32_t bucket;
    int64_t begin, end;  // in the shard space
  };
  // Maximal runs of consecutive owned elements of used parameters that `keep` accepts, within one bucket; padding
  // between them belongs to the run.
  template <typename Keep>
  std::vector<Run> runs(const FlatSpace& space, const GradReducer& grads, Keep keep) const;
  static char* at(const FlatSpace& space, const Buffer& buffer, const Run& run);

  bool gathers(const FlatSpace& space) const { return store_.sharded() && space.lp.full; }
  void start_gather(FlatSpace& space, const plan::Bucket& bucket);
  void finish_gather();

  ParamStore& store_;
  DeviceContext& device_;
  comm::CommunicatorPtr data_parallel_;
  GatherOptions gather_;
  at::Tensor steps_;
  std::vector<int32_t> stepped_;  // parameters counted since norm(), to be taken back when skipped
  std::vector<comm::WorkPtr> gathers_;
};

}  // namespace ds::zero
