// Slices that leave the device as they are made, before there is an engine: zero.Init(remote_device=...).
#pragma once
#include <memory>

#include "zero/spaces/offloaded_params.h"

namespace ds::zero {

class RemoteSlices {
 public:
  RemoteSlices(c10::Device device, const storage::Placement& placement, const ParamOffload& options,
               const storage::FileAccess& files)
      : storage_(std::make_shared<storage::ShardStorage>(device, storage::Budget{}, files)),
        params_(storage_, placement, options) {}

  // Its slice rests there from now on, until an engine gives it another placement.
  void take(ShardedParam& param) {
    if (param.slice_numel() > 0) params_.add_alone("parameter", param, {});
  }
  const std::shared_ptr<storage::ShardStorage>& storage() const { return storage_; }
  void settle() { storage_->settle(); }  // throws errors of writes

 private:
  const std::shared_ptr<storage::ShardStorage> storage_;
  OffloadedParams params_;
};

}  // namespace ds::zero
