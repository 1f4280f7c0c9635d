// The elements that ZenFlow updates in every step, with their masters and states.
//
// [Note: what is chosen]
// Of a parameter with two dimensions or more the columns with the largest sums of magnitudes of the gradient, over all
// ranks; all of any other parameter. Rows are the outermost dimension in memory, columns are everything else: for a
// weight of torch's Linear, its inputs. The same columns on every rank and for any number of ranks (of equal sums the
// first ones); each rank updates what it owns of them.
//
// [Note: taken]
// While they are chosen, their masters and states are in memory of their own, end to end by bucket, where they are
// updated: on the device, or on the host. In the planes of the store lie old values until put_back().
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "zero/device_context.h"
#include "zero/gradients/grad_reducer.h"
#include "zero/step/leased_row.h"
#include "zero/step/norm_sums.h"
#include "zero/spaces/param_store.h"
#include "zero/step/step.h"
#include "zero/step/strategies/strategy_options.h"

namespace ds::zero {

class Stepper;

class ZenFlowChoice {
 public:
  ZenFlowChoice(ParamStore& store, DeviceContext& device, Stepper& stepper, const ZenFlowOptions& options);

  // By the reduced gradients of this step. Every rank calls it. Only while nothing is taken.
  void choose(const GradReducer& grads);
  bool made() const { return !columns_.empty(); }
  // The chosen columns of each parameter, rising; empty for parameters that are chosen whole.
  const std::vector<std::vector<int64_t>>& columns() const { return columns_; }
  void set_columns(std::vector<std::vector<int64_t>> columns);  // empty: nothing is chosen

  bool taken() const { return taken_; }
  void take();
  void put_back();

  // One update of the chosen elements of the parameters with a gradient; the model's weights follow. `steps`: the
  // updates that each parameter has had. Only while the choice is taken.
  void update(const StepInputs& inputs, const GradReducer& grads, const float* steps);
  // Sums of squares of the chosen gradients of the last update, as they came, with their loss scale; not yet added up
  // over ranks.
  const NormSums& squares() const { return squares_; }

  // Whether something in a bucket is not chosen.
  bool leaves_rest(const ParamSpace& space, int32_t bucket) const;
  // This rank's row of the model's weights: the chosen ones are written once more.
  void write_weights(const ParamSpace& space, int32_t bucket, const at::Tensor& row) const;
  // Elements of all parameters that are chosen, and that are not.
  double chosen_numel() const { return chosen_; }
  double rest_numel() const { return rest_; }

 private:
  struct Run {
    size_t param;
    int64_t begin, end;  // among the chosen of the bucket
  };
  // The chosen elements of a bucket.
  struct Part {
    size_t space;
    int32_t bucket;
    at::Tensor positions;  // in this rank's row, rising
    std::vector<Run> runs;
    storage::Lease master;
    std::vector<storage::Lease> slots;
    bool rest = false;
  };

  void locate();
  const Part& part(const ParamSpace& space, int32_t bucket) const;
  template <typename Visit>
  void each_plane(Part& part, storage::Access access, const Visit& visit);

  ParamStore& store_;
  DeviceContext& device_;
  Stepper& stepper_;
  const double ratio_;
  const storage::Medium at_;             // the medium in which the chosen elements are updated
  std::unique_ptr<DeviceContext> host_;  // its kernels, where that is not the engine's device
  std::vector<int64_t> widths_;          // columns of each parameter; 0: it is chosen whole
  std::vector<std::vector<int64_t>> columns_;
  std::vector<std::vector<Part>> parts_;  // of each space, its buckets
  NormSums squares_;
  bool taken_ = false;
  double chosen_ = 0, rest_ = 0;
};

}  // namespace ds::zero
