// Where the buffers of training rest between the moments in which somebody works on them.
//
// The parameters that the model computes with rest on the device. Nobody but this says where the others are: the step,
// checkpoints and users acquire leases, wherever a buffer rests. A step computes where the masters of a bucket rest, or
// on the host where nobody can compute (files): what lies elsewhere is copied there and back.
#pragma once
#include "storage/placement.h"

namespace ds::zero {

enum class StateKind { kMaster, kGrad, kSlot };

struct Placements {
  storage::Placement master;
  storage::Placement grad;  // reduced gradients, where they are kept apart from the local ones (stages 2 and 3)
  storage::Placement slot;

  // The gradient of a parameter does not stay in the memory that backward fills.
  bool moves_grads() const { return grad.rest != storage::Medium::kDevice; }
};

inline bool operator==(const Placements& a, const Placements& b) {
  return a.master == b.master && a.grad == b.grad && a.slot == b.slot;
}

}  // namespace ds::zero
