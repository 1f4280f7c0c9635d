#include "zero/stage_policy.h"

#include "base/error.h"

namespace ds::zero {

namespace {

constexpr Cut kWhole = Cut::kWhole, kShard = Cut::kShard;

constexpr StagePolicy kPolicies[] = {
    {0, kWhole, kWhole, kWhole, Layout::kFlat, ReduceAt::kBoundary, GatherAt::kNever, true, {false, false, false}},
    {1, kWhole, kWhole, kShard, Layout::kFlat, ReduceAt::kBoundary, GatherAt::kAfterStep, false, {false, true, false}},
    {2, kWhole, kShard, kShard, Layout::kFlat, ReduceAt::kMicroStep, GatherAt::kAfterStep, false, {false, true, true}},
    {3, kShard, kShard, kShard, Layout::kPerParam, ReduceAt::kMicroStep, GatherAt::kOnUse, false, {true, true, true}},
};

}  // namespace

const StagePolicy& stage_policy(int stage) {
  for (const StagePolicy& policy : kPolicies)
    if (policy.stage == stage) return policy;
  fail(ErrorKind::kValue, "zero_optimization.stage ", stage, " does not exist; use 0, 1, 2 or 3");
}

}  // namespace ds::zero
