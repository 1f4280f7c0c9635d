// Engines of a few parameters, for tests that look at one property of them.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/process_mesh.h"
#include "comm/transports/local_communicator.h"
#include "zero/engine.h"

namespace ds::zero {

// A mesh of the ranks of `reductions`, all along "dp". Its communicators are `gathers` for gathers where that is given,
// else `reductions`.
inline comm::ProcessMeshPtr mesh_over(const comm::CommunicatorPtr& reductions,
                                      const comm::CommunicatorPtr& gathers = nullptr) {
  const auto open = [reductions, gathers](const std::string& key, const comm::SubMesh&, bool) {
    return gathers && key.find("/gather/") != std::string::npos ? gathers : reductions;
  };
  const plan::ProcessGrid grid(reductions->size(), {{"pp", 1, ""}, {"dp", 0, ""}, {"sp", 1, ""}, {"tp", 1, ""}});
  return std::make_shared<comm::ProcessMesh>(grid,
                                             std::make_shared<comm::Job>(reductions->rank(), reductions->size(), open));
}

// Parameters with names of their own, in the order of `tensors`.
inline std::vector<ParamSpec> specs_of(const std::vector<at::Tensor>& tensors, int groups = 1) {
  std::vector<ParamSpec> specs;
  for (const at::Tensor& tensor : tensors) {
    const auto i = static_cast<int32_t>(specs.size());
    specs.push_back({tensor, "w" + std::to_string(i), i % groups, i});
  }
  return specs;
}

// All parameters are trained, but for `others`. Those that the stage shards are cut here, unless the test has cut them.
inline std::shared_ptr<Engine> engine_of(std::vector<ParamSpec> specs, const EngineOptions& options,
                                         const comm::ProcessMeshPtr& mesh, std::vector<ShardedParamPtr> others = {}) {
  const plan::Axes same = plan::same_weights();
  for (ParamSpec& spec : specs)
    if (options.policy.shards_params() && !spec.sharded)
      spec.sharded = std::make_shared<ShardedParam>(spec.tensor, spec.name, mesh->size(same), mesh->rank(same));
  const auto spaces = std::make_shared<MeshSpaces>(mesh, options.policy, specs, others);
  return std::make_shared<Engine>(std::move(specs), std::move(others), options, spaces);
}

// Without `ranks` there is one rank.
inline std::shared_ptr<Engine> engine_of(std::vector<ParamSpec> specs, const EngineOptions& options = {},
                                         const comm::CommunicatorPtr& ranks = comm::local_communicator()) {
  return engine_of(std::move(specs), options, mesh_over(ranks));
}

inline void run_backward(Engine& engine, const at::Tensor& loss, bool reduce = true) {
  engine.backward().begin(reduce);
  loss.backward();
  engine.backward().end();
}

}  // namespace ds::zero
