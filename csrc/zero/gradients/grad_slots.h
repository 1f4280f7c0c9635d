// Writing gradients into slots: the parts of a bucket's memory that belong to its parameters.
//
// [Note: deferred copies]
// On a device each copy is a launch, and a gradient would need one or, where ranks hold slices, one for each rank. So
// gradients are held, and several are copied by one launch: when they have `kMostHeld` bytes, when one of them comes
// again, and in settle(), which whoever reads slots calls first. On the CPU copies are made at once, while the gradient
// is in the cache.
#pragma once
#include <c10/core/Stream.h>

#include <optional>
#include <utility>
#include <vector>

#include "storage/fence.h"
#include "storage/meta_memory.h"
#include "zero/device_context.h"
#include "zero/gradients/nonfinite_grads.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

// In every call `slots` is memory of the full space that starts at its element `begin`.
class GradSlots {
 public:
  // `nonfinite` looks at gradients whose copies are deferred.
  GradSlots(const ParamStore& store, const DeviceContext& device, const NonfiniteGrads& nonfinite)
      : store_(store),
        device_(device),
        nonfinite_(nonfinite),
        defers_(!storage::computes_on_host(store.device())),
        deferred_(store.size()) {}

  // The parameter's slot becomes grad * scale, or grows by it. `grad` has the parameter's shape and may be sparse.
  void put(size_t param, const at::Tensor& slots, int64_t begin, const at::Tensor& grad, float scale, bool add);
  // `gaps`, as [from, to) within `slots`, become zero: padding travels, too, and must not be garbage, which could be
  // nan.
  void zero_gaps(const at::Tensor& slots, const std::vector<std::pair<int64_t, int64_t>>& gaps);
  void zero(size_t param, const at::Tensor& slots, int64_t begin);
  void scale(size_t param, const at::Tensor& slots, int64_t begin, float factor);
  bool defers() const { return defers_; }
  void settle();  // everything that was put is in the slots, for work that is launched from now on

 private:
  static constexpr int64_t kMostHeld = 32 << 20;
  static constexpr int64_t kLargestGap = 1 << 14;  // elements; a larger one is cleared by itself
  // Copies of one kind, which one launch can make.
  struct Kind {
    at::ScalarType to, from;
    float scale;
    bool add;
    std::vector<kernels::Move> moves{};
  };

  void defer(size_t param, const at::Tensor& slots, const at::Tensor& grad, const std::vector<kernels::Move>& moves,
             float scale, bool add);
  void launch_deferred();
  void copy_zeros();

  const ParamStore& store_;
  const DeviceContext& device_;
  const NonfiniteGrads& nonfinite_;
  const bool defers_;
  std::vector<Kind> kinds_;
  std::vector<at::Tensor> held_;  // their gradients
  int64_t held_bytes_ = 0;
  std::vector<at::Tensor> gaps_;  // views of slots
  at::Tensor zeros_;              // what is copied there
  storage::FencePtr zeros_made_;
  std::vector<uint8_t> deferred_;      // of each parameter
  std::vector<size_t> params_;         // those
  std::optional<c10::Stream> stream_;  // on which they have come
};

}  // namespace ds::zero
