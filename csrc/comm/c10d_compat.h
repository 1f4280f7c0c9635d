// Every difference between torch versions in c10d lives here.
#pragma once
#include <torch/version.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ds::comm::compat {

// Debian's gloo (1.13) refuses bf16 in every collective; 2.x carries it.
inline bool gloo_carries_bf16() { return TORCH_VERSION_MAJOR >= 2; }

}  // namespace ds::comm::compat
