// Which ranks a parameter is spread over: rules by name. Adding a rule is adding a file with a SpaceRuleRegistration.
#pragma once
#include <string>

#include "zero/engine_ranks.h"
#include "zero/param_spec.h"
#include "zero/space_ranks.h"
#include "zero/stage_policy.h"

namespace ds::zero {

struct SpaceRule {
  std::string name;  // ParamSpec::rule
  SpaceRanks (*ranks)(const ParamSpec&, const StagePolicy&, const EngineRanks&);
};

struct SpaceRuleRegistration {
  explicit SpaceRuleRegistration(SpaceRule rule);
};

// What stands behind a dot in `name` is the rule's own business. Fails with the names that there are.
const SpaceRule& find_space_rule(const std::string& name);

// Of parameters that every data-parallel rank computes with: a stage shards over them or replicates over them.
SpaceRanks dense_ranks(const StagePolicy& policy, const EngineRanks& ranks);

}  // namespace ds::zero
