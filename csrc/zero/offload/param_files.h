// Files of slices that rest on a drive, under the published names below <nvme_path>/zero_stage_3.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>

#include "io/folders/run_folder.h"

namespace ds::zero {

// This rank's folders below `root`, as long as the result is referenced; files that a killed run has left there are
// removed. Throws if they belong to another run.
std::shared_ptr<io::RunFolder> param_folders(const std::string& root, int rank);

// "<dtype>params/rank<N>/<id>_param.tensor.swp"; `name` instead of a negative id.
std::string param_file(at::ScalarType type, int rank, int64_t id, const std::string& name);

}  // namespace ds::zero
