// Parameters of which the ranks of one group hold copies, while the ranks of another group hold others of the same
// kind: experts. Groups by name: "expert_data_parallel", the ranks with the same ones; "expert_parallel", one rank of
// each kind. A model whose layers spread their experts over different ranks has a rule "experts.<name>" for each kind
// of layer, and groups "expert_data_parallel.<name>", "expert_parallel.<name>".
#include "comm/transports/local_communicator.h"
#include "zero/spaces/rules/space_rule.h"

namespace ds::zero {

namespace {

SpaceRanks expert_ranks(const ParamSpec& spec, const StagePolicy& policy, const EngineRanks& ranks) {
  const comm::CommunicatorPtr nobody = comm::local_communicator();
  const std::string name =
      spec.rule.substr(spec.rule.find('.') == std::string::npos ? spec.rule.size() : spec.rule.find('.'));
  const comm::CommunicatorPtr& copies = ranks.other("expert_data_parallel" + name);
  const comm::CommunicatorPtr& kinds = ranks.other("expert_parallel" + name);
  // With tensor parallelism for all but the experts, these have the tensor-parallel ranks among their own.
  const bool wide = copies->size() * kinds->size() > ranks.count();
  SpaceRanks made{nobody, copies, {{kinds}}};
  if (policy.shards_states()) made = {copies, nobody, {{copies}, {kinds}}};
  add_model_ranks(&made.norm_over, ranks, spec.copied_along, !wide);
  const auto gathers = ranks.others.find("expert_gathers" + name);  // the copies' ranks again
  if (gathers != ranks.others.end()) made.gathers = [own = gathers->second] { return own; };
  return made;
}

const SpaceRuleRegistration experts_registration({"experts", &expert_ranks});

}  // namespace

}  // namespace ds::zero
