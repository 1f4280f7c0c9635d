// The memory in which an optimizer step works.
//
// Masters, states, gradients and parameters of a bucket are leased in the tier
// of its masters, on the host if that tier is files, and on the device if the
// rule needs scratch or sums there. If all of them rest in that tier, one lease
// of each serves all buckets, and it is a view. Otherwise a bucket is updated
// while the next one is fetched and the last one is written back, so transfers
// need the memory of a few buckets, whatever the size of the model. A bucket
// without used parameters is not transferred, and a skipped step transfers
// nothing.
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

  // The kernels of a medium.
  DeviceContext& context(storage::Medium at);
  // Passes the step scale of the device on to the kernels of the host.
  void share_step_scale();

  // The medium in which a pass of the rule computes. `scaled`: by a factor on the
  // device.
  storage::Medium of_pass(const ParamSpace& space, const optim::Rule& rule, bool scaled, int32_t bucket) const;
  // Whether all operands of an update rest in this medium, each in one piece.
  bool hold_all(const ParamSpace& space, const Buffer& grad, int32_t bucket, storage::Medium at) const;
  // Fails if the rule needs more buffers for a bucket than the options allow.
  void check_buffers(const optim::Rule& rule) const;
  // A hint that this bucket is updated next.
  void prefetch(const ParamSpace& space, const Buffer& grad, int32_t bucket, storage::Medium at) const;

  LeasedRow lease(const ParamSpace& space, const Buffer& buffer, int32_t bucket, storage::Access access,
                  storage::Medium at) const {
    return LeasedRow(*store_.storage(), space, buffer, bucket, access, at);
  }
  // A lease in the medium in which the buffer rests; on the host if kernels cannot address it.
  LeasedRow lease_at_rest(const ParamSpace& space, const Buffer& buffer, int32_t bucket, storage::Access access) const {
    return lease(space, buffer, bucket, access, resting(space, buffer, bucket).value_or(storage::Medium::kHost));
  }
  // Waits until rows that were computed in another tier are written back.
  void arrive(const ParamSpace& space) const;
  // Whether weights of a bucket may be transferred while the next one is updated.
  bool travel(const ParamSpace& space) const { return space.has_masters() && !space.master.data.defined(); }

  // Calls visit(-1, medium) for a buffer that rests in one piece of memory, else
  // visit(bucket, medium) for each bucket.
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
