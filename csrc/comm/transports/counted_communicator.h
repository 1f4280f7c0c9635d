// A rank of a group whose other ranks do not exist: for steps that are planned.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "plan/step_plan.h"

namespace ds::comm {

// The clock of the step, and the cost of calls between the ranks of this group.
struct CountedTime {
  std::shared_ptr<plan::StepPlan> step;  // null: calls take no time
  plan::LinkCost link{};
  // Called with the bytes of shared memory that an exchange touches. Null: the ranks share none, and rows are packed.
  std::function<void(int64_t)> touched{};
};

// Carries every verb, of tensors on any device, and returns at once. Tensors in host memory get what they would if all
// ranks passed the same values: a sum is the value times the size of the group, all parts of an all-gather are this
// rank's, and what a rank receives is zeros. Tensors of other devices are not touched. logged() records the calls.
CommunicatorPtr counted_communicator(int rank, int size, std::string group = {}, CountedTime time = {});

}  // namespace ds::comm
