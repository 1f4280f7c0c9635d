// Writing gradients into slots: the parts of a bucket's memory that belong to its parameters.
#pragma once
#include "zero/device_context.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

// In every call `slots` is memory of the full space that starts at its element `begin`.
class GradSlots {
 public:
  GradSlots(const ParamStore& store, const DeviceContext& device) : store_(store), device_(device) {}

  // The parameter's slot becomes grad * scale, or grows by it. `grad` has the parameter's shape and may be sparse.
  void put(size_t param, const at::Tensor& slots, int64_t begin, const at::Tensor& grad, float scale, bool add);
  void zero(size_t param, const at::Tensor& slots, int64_t begin);
  void scale(size_t param, const at::Tensor& slots, int64_t begin, float factor);

 private:
  const ParamStore& store_;
  const DeviceContext& device_;
};

}  // namespace ds::zero
