// Parameters of which the ranks of one group hold copies, while the ranks of another group hold others of the same
// kind: experts. Groups by name: "expert_data_parallel", the ranks with the same ones; "expert_parallel", one rank of
// each kind.
#include "comm/transports/local_communicator.h"
#include "zero/space_rules/space_rule.h"

namespace ds::zero {

namespace {

SpaceRanks expert_ranks(const ParamSpec&, const StagePolicy& policy, const EngineRanks& ranks) {
  const comm::CommunicatorPtr nobody = comm::local_communicator();
  const comm::CommunicatorPtr &copies = ranks.other("expert_data_parallel"), &kinds = ranks.other("expert_parallel");
  if (!policy.shards_states()) return {nobody, copies, {kinds}};
  const auto gathers = ranks.others.find("expert_gathers");  // the copies' ranks again
  if (gathers == ranks.others.end()) return {copies, nobody, {copies, kinds}};
  return {copies, nobody, {copies, kinds}, [own = gathers->second] { return own; }};
}

const SpaceRuleRegistration experts_registration({"experts", &expert_ranks});

}  // namespace

}  // namespace ds::zero
