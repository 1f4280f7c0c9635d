// The memory in which an optimizer step works.
//
// Masters, states, gradients and parameters are leased where the masters of a
// bucket rest, or on the host where nobody can compute (files); on the device
// where a rule needs scratch or sums there. Where all of them rest there, one
// lease of each serves all buckets, and it is a view. Else one bucket is worked
// on while the next one is fetched and the last one is written back: what
// travels takes the memory of a few buckets, whatever the size of the model. A
// bucket of which no parameter was used does not travel, and nothing does when
// the step is skipped.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>

#include "optim/rule.h"
#include "zero/device_context.h"
#include "zero/step/leased_row.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

// A bucket of a space; -1: all of them.
class StepMemory {
 public:
  StepMemory(const ParamStore& store, DeviceContext& device) : store_(store), device_(device) {}

  // Kernels of who works there.
  DeviceContext& context(storage::Medium at);
  // The device has found another one, which kernels of the host need, too.
  void share_step_scale();

  // The medium in which a pass of the rule works. `scaled`: by a factor that is on the
  // device.
  storage::Medium of_pass(const ParamSpace& space, const optim::Rule& rule, bool scaled, int32_t bucket) const;
  // Whether everything that an update needs rests there, in one piece.
  bool hold_all(const ParamSpace& space, const Buffer& grad, int32_t bucket, storage::Medium at) const;
  // Fails where the rule needs more buffers for a bucket than there may be.
  void check_buffers(const optim::Rule& rule) const;
  // A hint: an update of this bucket comes next.
  void prefetch(const ParamSpace& space, const Buffer& grad, int32_t bucket, storage::Medium at) const;

  LeasedRow lease(const ParamSpace& space, const Buffer& buffer, int32_t bucket, storage::Access access,
                  storage::Medium at) const {
    return LeasedRow(*store_.storage(), space, buffer, bucket, access, at);
  }
  // A lease in the medium in which the buffer rests; on the host if kernels cannot address it.
  LeasedRow lease_at_rest(const ParamSpace& space, const Buffer& buffer, int32_t bucket, storage::Access access) const {
    return lease(space, buffer, bucket, access, resting(space, buffer, bucket).value_or(storage::Medium::kHost));
  }
  // Waits until rows that were computed elsewhere are written back to memory.
  void arrive(const ParamSpace& space) const;
  // Weights of a bucket may be on their way back while the next one is stepped.
  bool travel(const ParamSpace& space) const { return space.has_masters() && !space.master.data.defined(); }

  // Calls visit(bucket, medium) for a buffer that rests in one piece of memory
  // with -1, else for each bucket.
  template <typename Visit>
  void each_piece(const ParamSpace& space, const Buffer& buffer, const Visit& visit) const {
    if (const auto at = resting(space, buffer, -1)) return visit(-1, *at);
    for (auto b = static_cast<int32_t>(space.map.buckets.size()) - 1; b >= 0; --b)
      visit(b, resting(space, buffer, b).value_or(storage::Medium::kHost));
  }

 private:
  std::optional<storage::Medium> resting(const ParamSpace& space, const Buffer& buffer, int32_t bucket) const {
    return store_.storage()->resting(buffer.plane, part_of(space, buffer, bucket));
  }

  const ParamStore& store_;
  DeviceContext& device_;
  std::unique_ptr<DeviceContext> host_;  // kernels of the host, where the engine's device is another one
};

}  // namespace ds::zero
