// The ranks over which a parameter is spread: rules by name. Adding a rule is adding a file with a
// SpaceRuleRegistration.
#pragma once
#include <string>

#include "zero/spaces/engine_ranks.h"
#include "zero/spaces/param_spec.h"
#include "zero/spaces/space_ranks.h"
#include "zero/stage_policy.h"

namespace ds::zero {

struct SpaceRule {
  std::string name;  // ParamSpec::rule
  SpaceRanks (*ranks)(const ParamSpec&, const StagePolicy&, const EngineRanks&);
};

struct SpaceRuleRegistration {
  explicit SpaceRuleRegistration(SpaceRule rule);
};

// Only the rule itself reads the text behind a dot in `name`. Fails with the names that there are.
const SpaceRule& find_space_rule(const std::string& name);

// Ranks of parameters that every data-parallel rank computes with: a stage shards or replicates over them.
SpaceRanks dense_ranks(const StagePolicy& policy, const EngineRanks& ranks, const std::string& copied_along = "");

// Appends the ranks with other parts of the model, which end norm_over of each space: tensor-parallel ones, unless they
// are among its ranks already (`slices` false), then the stages of a pipeline. `copied_along`, "tp" or "pp": an earlier
// rank of these trains the same parameter.
void add_model_ranks(std::vector<NormRanks>* norm_over, const EngineRanks& ranks, const std::string& copied_along,
                     bool slices = true);

}  // namespace ds::zero
