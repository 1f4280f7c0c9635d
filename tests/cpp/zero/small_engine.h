// Engines of a few parameters, for tests that look at one property of them.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "comm/transports/local_communicator.h"
#include "zero/engine.h"

namespace ds::zero {

// All parameters are trained; without `ranks` there is one rank.
inline std::shared_ptr<Engine> engine_of(std::vector<ParamSpec> specs, const EngineOptions& options = {},
                                         const EngineRanks& ranks = {comm::local_communicator()}) {
  return std::make_shared<Engine>(std::move(specs), std::vector<ShardedParamPtr>{}, options, ranks);
}

inline void run_backward(Engine& engine, const at::Tensor& loss, bool reduce = true) {
  engine.backward().begin(reduce);
  loss.backward();
  engine.backward().end();
}

}  // namespace ds::zero
