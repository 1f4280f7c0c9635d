// The ranks of an engine's spaces: the answers of the rules (plan/spaces), with communicators of the engine's mesh.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/process_mesh.h"
#include "plan/spaces/space_rule.h"
#include "zero/spaces/param_spec.h"
#include "zero/spaces/space_ranks.h"
#include "zero/stage_policy.h"

namespace ds::zero {

class MeshSpaces {
 public:
  // Opens the communicators over which these parameters are reduced and their norm is added up. Those of gathers are
  // opened when they are asked for. `others`: sharded parameters that are not trained. Fails on all data-parallel ranks
  // where two of them need different communicators.
  MeshSpaces(comm::ProcessMeshPtr mesh, const StagePolicy& policy, const std::vector<ParamSpec>& params = {},
             const std::vector<ShardedParamPtr>& others = {});
  MeshSpaces(const MeshSpaces&) = delete;
  MeshSpaces& operator=(const MeshSpaces&) = delete;

  // The ranks of dense parameters that no other rank has a copy of.
  const SpaceRanks& everyone() const { return of("dense", ""); }
  // The ranks of a parameter that was given to the constructor. `open` is valid while this object lives.
  const SpaceRanks& of(const std::string& rule, const std::string& copied_along) const;
  const comm::CommunicatorPtr& data_parallel() const;  // of dense parameters; at stage 3 the ranks of one shard group
  const std::vector<comm::CommunicatorPtr>& communicators() const { return opened_; }  // of several ranks each
  // All collectives over these communicators that are under way or to come fail with `why`, on all ranks.
  void abort(const std::string& why) const;

 private:
  using Key = std::pair<std::string, std::string>;  // rule, axis of copies

  void keep(const std::vector<comm::CommunicatorPtr>& made);
  const comm::HostRanks& by_host(const Key& key);

  const comm::ProcessMeshPtr mesh_;
  const bool shards_;
  c10::Device device_{c10::kCPU};  // of the first parameter
  bool in_memory_ = false;         // all parameters are on the host
  std::map<Key, SpaceRanks> spaces_;
  std::map<Key, comm::HostRanks> by_host_;
  std::vector<comm::CommunicatorPtr> opened_;
};
using MeshSpacesPtr = std::shared_ptr<const MeshSpaces>;

}  // namespace ds::zero
