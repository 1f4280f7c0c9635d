// Which ranks a parameter is spread over: rules by name. Adding a rule is adding a file with a SpaceRuleRegistration.
#pragma once
#include <map>
#include <string>

#include "zero/param_spec.h"
#include "zero/space_ranks.h"
#include "zero/stage_policy.h"

namespace ds::zero {

// The groups of ranks that this one belongs to.
struct EngineRanks {
  comm::CommunicatorPtr data_parallel;                  // of dense parameters; at stage 3 the ranks of one shard group
  comm::CommunicatorPtr replicas;                       // other groups that hold the same shards (MiCS), or null
  std::map<std::string, comm::CommunicatorPtr> others;  // by name, for rules
  const comm::CommunicatorPtr& other(const std::string& name) const;  // fails with the names that there are
};

struct SpaceRule {
  std::string name;  // ParamSpec::rule
  SpaceRanks (*ranks)(const ParamSpec&, const StagePolicy&, const EngineRanks&);
};

struct SpaceRuleRegistration {
  explicit SpaceRuleRegistration(SpaceRule rule);
};

const SpaceRule& find_space_rule(const std::string& name);  // fails with the names that there are

// Of parameters that every data-parallel rank computes with: a stage shards over them or replicates over them.
SpaceRanks dense_ranks(const StagePolicy& policy, const EngineRanks& ranks);

}  // namespace ds::zero
