#include "zero/stage_policy.h"

#include "base/error.h"

namespace ds::zero {

namespace {

constexpr StagePolicy kPolicies[] = {
    {0, false, false, false, ReduceWhen::kBoundary},
    {1, true, false, false, ReduceWhen::kBoundary},
    {2, true, true, false, ReduceWhen::kEveryMicroStep},
    {3, true, true, true, ReduceWhen::kEveryMicroStep},
};

}  // namespace

const StagePolicy& stage_policy(int stage) {
  for (const StagePolicy& policy : kPolicies)
    if (policy.stage == stage) return policy;
  fail(ErrorKind::kValue, "zero_optimization.stage ", stage, " does not exist; use 0, 1, 2 or 3");
}

}  // namespace ds::zero
