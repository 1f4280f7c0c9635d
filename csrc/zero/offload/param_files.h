// Files of slices that rest on a drive, under the published names below <nvme_path>/zero_stage_3.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>

#include "io/run_folder.h"

namespace ds::zero {

// This rank's folders below `root`, for as long as somebody holds the result: what a run that was killed has left there
// is removed. Throws where they are another run's.
std::shared_ptr<io::RunFolder> param_folders(const std::string& root, int rank);

// "<dtype>params/rank<N>/<id>_param.tensor.swp"; `name` instead of a negative id.
std::string param_file(at::ScalarType type, int rank, int64_t id, const std::string& name);

}  // namespace ds::zero
