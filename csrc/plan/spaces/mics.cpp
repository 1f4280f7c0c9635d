// The rule of dense parameters under MiCS: runs of data-parallel ranks share one copy of the model, and other runs hold
// the same shards. Source: Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud"
// (VLDB 2022), section 3.
#include "plan/spaces/space_rule.h"

namespace ds::plan {

namespace {

SpaceAxes mics_axes(const SpaceQuery& query) {
  SpaceAxes made{{"dp.mics"}, {"dp.replicas"}, {{{"dp.mics"}}}};
  add_second_copy(&made, query);
  add_model_axes(&made, query);
  return made;
}

const SpaceRuleRegistration mics_registration({"mics", &mics_axes, "dp.mics"});

}  // namespace

}  // namespace ds::plan
