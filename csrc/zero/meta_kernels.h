// Kernels for the meta device, whose tensors have no memory.
#pragma once
#include "kernels/codes.h"
#include "kernels/table.h"

namespace ds::zero {

// Tables whose entries tell the installed storage::MetaMemory what they would read and write, and do nothing else: a
// step that is planned runs the engine's code, and its values are constants (DeviceContext::read_step_scale). Updates
// tell nothing, because the planner counts what they read and write (PlannedRun.update_seconds). Rules are those of the
// CPU's library.
const kernels::KernelTable& meta_kernels();
const kernels::CodeKernels& meta_codes();

}  // namespace ds::zero
