#include "zero/stage_policy.h"

#include "base/error.h"

namespace ds::zero {

namespace {

constexpr StagePolicy kPolicies[] = {
    {0, false, false, false, ReduceWhen::kBoundary},
};

}  // namespace

const StagePolicy& stage_policy(int stage) {
  for (const StagePolicy& policy : kPolicies)
    if (policy.stage == stage) return policy;
  fail(ErrorKind::kNotImplemented, "zero_optimization.stage ", stage, " is not supported yet; use stage 0");
}

}  // namespace ds::zero
