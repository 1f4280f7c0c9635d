// The rule of dense parameters, which all data-parallel ranks train.
#include "base/error.h"
#include "comm/transports/local_communicator.h"
#include "zero/spaces/rules/space_rule.h"

namespace ds::zero {

SpaceRanks dense_ranks(const StagePolicy& policy, const EngineRanks& ranks, const std::string& copied_along) {
  const comm::CommunicatorPtr nobody = comm::local_communicator();
  SpaceRanks made{nobody, ranks.data_parallel, {}};
  if (policy.shards_states())
    made = {ranks.data_parallel, ranks.replicas ? ranks.replicas : nobody, {{ranks.data_parallel}}, ranks.gathers};
  add_model_ranks(&made.norm_over, ranks, copied_along);
  return made;
}

void add_model_ranks(std::vector<NormRanks>* norm_over, const EngineRanks& ranks, const std::string& copied_along,
                     bool slices) {
  if (!copied_along.empty() && copied_along != "tp" && copied_along != "pp")
    fail(ErrorKind::kValue, "a parameter is copied along the axis '", copied_along, "'; 'tp' and 'pp' are known");
  if (slices && ranks.tensor) norm_over->push_back({ranks.tensor, copied_along != "tp"});
  if (ranks.pipe) norm_over->push_back({ranks.pipe, copied_along != "pp"});
}

namespace {

const SpaceRuleRegistration dense_registration({"dense", [](const ParamSpec& spec, const StagePolicy& policy,
                                                            const EngineRanks& ranks) {
                                                  return dense_ranks(policy, ranks, spec.copied_along);
                                                }});

}  // namespace

}  // namespace ds::zero
