// A rank of a group whose other ranks do not exist: for steps that are planned.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "comm/c10d_compat.h"
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

// The other ranks of a group that are planned, too, in processes of their own. Messages in host memory, such as the
// notes of a pipeline's messages, reach them through this store, whose keys belong to the group alone. These messages
// take no time: that of a pipeline's is in plan/pipe_cost.h.
using PlannedPeers = c10::intrusive_ptr<c10d::Store>;

// Carries every verb, of tensors on any device, and returns at once. Tensors get what they would if all ranks passed
// the same values: a sum is the value times the size of the group, all parts of an all-gather are this rank's, and what
// a rank receives is zeros. Meta tensors are not touched. logged() records the calls. `peers` is null where no other
// rank is planned.
CommunicatorPtr counted_communicator(int rank, int size, std::string group = {}, CountedTime time = {},
                                     PlannedPeers peers = {});

}  // namespace ds::comm
