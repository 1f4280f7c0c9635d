// The placements of masters, gradients and optimizer states for a configuration that gives only the size of the memory:
// those with which a step takes the least time (plan/place_plan.h).
#pragma once
#include <cstdint>
#include <string>

#include "comm/communicator.h"
#include "plan/place_plan.h"
#include "storage/file_access.h"
#include "zero/offload/placements.h"

namespace ds::zero {

struct TierBytes {
  int64_t device = 0, host = INT64_MAX, file = 0;  // available to this rank's states
  std::string folder;                              // of files
  bool pinned = false;
  int64_t accumulation = 1;  // micro-steps of a step
  plan::PlaceRates rates{};  // of this machine; zeros: not measured
};

struct StateBytes {
  int64_t grad = 0, master = 0, slots = 0;  // of this rank
  int64_t weight = 0;                       // of their parameters
};

// Each takes whole buckets of each tier. Without rates, gradients, masters and states fill the device in this order,
// then the host, then files. Throws ErrorKind::kValue where they do not fit; the text names the missing bytes.
Placements auto_placements(const StateBytes& need, const TierBytes& have);

// The rates of this machine, measured once and kept (storage/rates.h). `device`: on which the model computes; for meta
// the rates of the machine that is planned.
plan::PlaceRates machine_rates(c10::Device device, bool pinned, const std::string& folder,
                               const storage::FileAccess& files, int threads);

// `have` with the rates of the slowest rank, so that all ranks find the same plan; unchanged where there is no choice.
TierBytes rated(const StateBytes& need, TierBytes have, c10::Device device, const storage::FileAccess& files,
                comm::Communicator& ranks, int threads);

}  // namespace ds::zero
