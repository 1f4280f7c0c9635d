// Kernels for the meta device, whose tensors have no memory.
#pragma once
#include "kernels/table.h"

namespace ds::zero {

// A table whose entries do nothing: a step that is planned runs the engine's code, and its values are constants
// (DeviceContext::read_step_scale). Rules are those of the CPU's library.
const kernels::KernelTable& meta_kernels();

}  // namespace ds::zero
