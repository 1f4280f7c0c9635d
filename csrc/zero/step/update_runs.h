// The elements that an update walks: runs of what a rank owns, and one pass of a rule over them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "optim/rule.h"
#include "zero/device_context.h"
#include "zero/step/leased_row.h"

namespace ds::zero {

struct UpdateRun {
  int32_t bucket;
  int64_t begin, end;  // in the shard space
  int32_t index;       // of the first parameter within the space
};

// Maximal runs of consecutive owned elements of which `keep(extent, param)` is true, within one bucket; padding between
// them belongs to the run. `apart`: a run for each parameter.
template <typename Keep>
std::vector<UpdateRun> owned_runs(const ParamSpace& space, Keep keep, bool apart = false) {
  std::vector<UpdateRun> result;
  bool open = false;
  for (size_t e : space.owned) {
    const plan::Extent& extent = space.map.extents[e];
    const bool take = keep(e, static_cast<size_t>(space.params[extent.param]));
    const int32_t bucket = space.map.bucket_of[extent.param];
    const int64_t begin = extent.shard_offset, end = begin + extent.numel;
    if (take && open && !apart && result.back().bucket == bucket) {
      result.back().end = end;
    } else if (take) {
      result.push_back({bucket, begin, end, extent.param});
    }
    open = take;
  }
  return result;
}

// By how many updates the parameters have seen: bias correction depends on it.
using RunsByCount = std::map<float, std::vector<UpdateRun>>;

// The elements that an update takes. A bucket of -1 stands for all of them.
struct UpdateChoice {
  int32_t bucket = -1;
  std::function<bool(size_t param)> used;
  const float* steps = nullptr;              // of each parameter
  std::function<bool(size_t extent)> takes;  // unset: all
  bool apart = false;
};
RunsByCount runs_by_count(const ParamSpace& space, const UpdateChoice& choice);

// The rows that it reads and writes.
struct UpdateRows {
  LeasedRow master, grad, lp;  // lp: none where nothing else takes the new values
  std::vector<LeasedRow> slots;
  // Memory of the device for rules that need more: an fp32 number for each element of the shard space from `origin` on;
  // a row of fp64 numbers for each parameter of the engine.
  float* scratch = nullptr;
  int64_t origin = 0;
  double* sums = nullptr;
  int64_t sums_width = 0;
};

// A pass of the rule, with the factor and decision in `scale`, which is in memory of the context's device.
void update_runs(DeviceContext& context, const ParamSpace& space, const optim::Rule& rule, const optim::Pass& pass,
                 const RunsByCount& found, const UpdateRows& rows, const std::vector<double>& hyper,
                 const kernels::StepScale* scale);

}  // namespace ds::zero
