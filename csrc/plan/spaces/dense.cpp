// The rule of dense parameters, which all data-parallel ranks train.
#include "plan/spaces/space_rule.h"

namespace ds::plan {

namespace {

SpaceAxes dense_axes(const SpaceQuery& query) {
  SpaceAxes made;
  (query.shards ? made.shard : made.replicas) = same_weights();
  if (query.shards) made.norm_over = {{made.shard}};
  if (query.shards) add_second_copy(&made, query);
  add_model_axes(&made, query);
  return made;
}

const SpaceRuleRegistration dense_registration({"dense", &dense_axes});

}  // namespace

}  // namespace ds::plan
