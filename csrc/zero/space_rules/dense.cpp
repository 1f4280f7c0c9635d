#include "comm/transports/local_communicator.h"
#include "zero/space_rules/space_rule.h"

namespace ds::zero {

SpaceRanks dense_ranks(const StagePolicy& policy, const EngineRanks& ranks) {
  const comm::CommunicatorPtr nobody = comm::local_communicator();
  if (!policy.shards_states()) return {nobody, ranks.data_parallel, {nobody}};
  return {ranks.data_parallel, ranks.replicas ? ranks.replicas : nobody, {ranks.data_parallel}, ranks.gathers};
}

namespace {

const SpaceRuleRegistration dense_registration({"dense",
                                                [](const ParamSpec&, const StagePolicy& policy,
                                                   const EngineRanks& ranks) { return dense_ranks(policy, ranks); }});

}  // namespace

}  // namespace ds::zero
