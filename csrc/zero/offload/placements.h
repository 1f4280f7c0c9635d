// The placements of the buffers of training between the moments in which they are used.
//
// Only this file decides them: gathers, the step, checkpoints and users acquire leases, wherever a buffer
// rests. A step computes where the masters of a bucket rest, or on the host where nobody can compute (files): what lies
// elsewhere is copied there and back.
#pragma once
#include <cstdint>

#include "storage/placement.h"

namespace ds::zero {

enum class StateKind { kMaster, kGrad, kSlot };

// Options of parameters that do not rest on the device.
struct ParamOffload {
  int64_t host_numel = INT64_MAX;  // elements that rest on the host, the first ones, where the others rest in files
  // Of parameters in files: the number of buffers for their copies on the host, and the elements of each.
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

  // The slices of parameters have no memory on the device.
  bool moves_params() const { return lp.rest != storage::Medium::kDevice; }
  // Something of the optimizer's does not rest on the device.
  bool moves_states() const {
    const storage::Placement device;
    return !(master == device && grad == device && slot == device);
  }
  // The gradient of a parameter does not stay in the memory that backward fills.
  bool moves_grads() const { return grad.rest != storage::Medium::kDevice; }
};

// How a step fetches what rests elsewhere.
struct Swapping {
  int64_t bucket_numel = INT64_MAX;  // elements of a bucket, at most
  // Of files: the number of rows of the largest bucket that may be in the host's memory at a time: for the bucket that
  // is worked on, the one that is read ahead and the one that is being written, each. 0: no limit.
  int64_t buffer_count = 0;
  // So many rows of reduced gradients may be on their way from the device to where they rest; the backward waits for
  // the first of them to be there before another one leaves. 0: no limit.
  int64_t leaving_rows = 0;
  bool reads_ahead = true, writes_behind = true;
  bool own_folder = false;  // no other run may use the folder of the files while this one lives
  bool fast_init = false;   // no zeros are written into new files, which read as zeros
};

inline bool operator==(const Placements& a, const Placements& b) {
  return a.master == b.master && a.grad == b.grad && a.slot == b.slot && a.lp == b.lp;
}

}  // namespace ds::zero
