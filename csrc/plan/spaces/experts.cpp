// The rule of experts: ranks along "<rule>.edp" train the same ones, ranks along "<rule>.ep" have one rank of each
// kind. These axes are a fold of the grid that has the name of the rule. A model whose layers spread their experts over
// different ranks has a rule "experts.<name>", and a fold, for each kind of layer.
#include "plan/spaces/space_rule.h"

namespace ds::plan {

namespace {

SpaceAxes expert_axes(const SpaceQuery& query) {
  const Axes copies{query.rule + ".edp"}, kinds{query.rule + ".ep"};
  // With tensor parallelism for all but the experts, these have the tensor-parallel ranks among their own.
  const bool wide = query.grid.size({copies[0], kinds[0]}) > query.grid.size(same_weights());
  SpaceAxes made;
  made.purpose = Purpose::kExperts;
  (query.shards ? made.shard : made.replicas) = copies;
  if (query.shards) made.norm_over.push_back({copies});
  made.norm_over.push_back({kinds});
  add_model_axes(&made, query, !wide);
  return made;
}

const SpaceRuleRegistration expert_registration({"experts", &expert_axes});

}  // namespace

}  // namespace ds::plan
