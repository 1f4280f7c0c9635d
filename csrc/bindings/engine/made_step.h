// The report of a step for Python, with the memory that a log of steps tells of.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>

#include "base/sizes.h"
#include "zero/engine.h"

namespace ds::bindings {

// Bytes of this rank: of each kind of state, of parameters that are gathered, and of buffers for gradients on their
// way.
inline std::map<std::string, int64_t> bytes_of(zero::Engine& engine) {
  std::map<std::string, int64_t> bytes;
  for (const auto& [what, held] : engine.params().held_bytes()) bytes[what] = held;
  int64_t& gathered = bytes["gathered"];
  if (engine.gatherer() != nullptr)
    for (const zero::ShardedParamPtr& param : engine.gatherer()->params())
      if (param->available())
        gathered += sizes::product("bytes of gathered parameters", param->padded_numel(),
                                   static_cast<int64_t>(c10::elementSize(param->dtype())));
  bytes["wire"] = engine.grads().memory().bytes();
  return bytes;
}

struct MadeStep : zero::StepReport {
  std::map<std::string, int64_t> bytes;  // after the step, while its clock runs: a log of steps tells of them
};

}  // namespace ds::bindings
