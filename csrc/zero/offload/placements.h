// The placements of the buffers of training between the moments in which they are used.
//
// Gathers, the step, checkpoints and users acquire leases, whatever the tier of a buffer. A step computes in the tier
// of the masters of a bucket, or on the host if that is files: buffers of other tiers are copied there and back.
#pragma once
#include <cstdint>

#include "storage/placement.h"

namespace ds::zero {

enum class StateKind { kMaster, kGrad, kSlot };

// Options of parameters that do not rest on the device.
struct ParamOffload {
  int64_t host_numel = INT64_MAX;  // elements that rest on the host, the first ones, where the others rest in files
  // For parameters in files: the number of buffers for their copies on the host, and the elements of each.
  int64_t buffers = INT64_MAX, buffer_numel = INT64_MAX;
  int rank = 0;  // of the job: names the folder of files

  bool limited() const { return buffer_numel != INT64_MAX; }
};

struct Placements {
  storage::Placement master;
  storage::Placement grad;  // reduced gradients, where the stage shards states
  storage::Placement slot;
  // The parameters that the model computes with, where a rank has a slice of each (stage 3).
  storage::Placement lp = {};

  // Whether the slices of parameters have no memory on the device.
  bool moves_params() const { return lp.rest != storage::Medium::kDevice; }
  // Whether masters, gradients or optimizer states rest outside of the device.
  bool moves_states() const {
    const storage::Placement device;
    return !(master == device && grad == device && slot == device);
  }
  // Whether gradients leave the memory that backward fills.
  bool moves_grads() const { return grad.rest != storage::Medium::kDevice; }
};

// Limits and options of a step that fetches buffers of other tiers.
struct Swapping {
  int64_t bucket_numel = INT64_MAX;  // elements of a bucket, at most
  // For files: the number of rows of the largest bucket in the host's memory at a time, for each of the bucket that is
  // updated, the one that is read ahead and the one that is written. 0: no limit.
  int64_t buffer_count = 0;
  // The number of rows of reduced gradients in transfer from the device to their tier; the backward waits for the first
  // of them before it starts another transfer. 0: no limit.
  int64_t leaving_rows = 0;
  bool reads_ahead = true, writes_behind = true;
  bool own_folder = false;  // no other run may use the folder of the files while this one lives
  bool fast_init = false;   // no zeros are written into new files, which read as zeros
};

inline bool operator==(const Placements& a, const Placements& b) {
  return a.master == b.master && a.grad == b.grad && a.slot == b.slot && a.lp == b.lp;
}

}  // namespace ds::zero
