// The options of the strategies of the step, from the configuration.
#pragma once
#include <cstdint>

namespace ds::zero {

// Sections zero_optimization.zenflow; 0 stands for "auto", and for unknown.
struct ZenFlowOptions {
  enum class Select { kAuto, kByStep, kByEpoch };

  double topk_ratio = 0.0;
  Select select = Select::kAuto;
  int64_t select_interval = 0;
  int64_t update_interval = 0;
  bool overlap = false;
  bool offload = false;  // masters and states of what is chosen stay on the host, too
  double auto_ratio = 0.0;
  int64_t warm_up = 0;
  int64_t steps_per_epoch = 0;
};

struct StrategyOptions {
  int threads = 1;  // of updates that run beside the training
  ZenFlowOptions zenflow;
};

}  // namespace ds::zero
