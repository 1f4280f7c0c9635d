// Calls as scripts make them on torch.distributed: a tensor or one for each rank, of any strides.
#pragma once
#include <vector>

#include "comm/communicator.h"

namespace ds::comm {

// op.h describes the tensors of each verb; n parts may be one tensor or a list of n. The splits of kAllToAll are those
// of the first dimension of a tensor; empty: equal ones.
struct ListCall {
  Verb verb = Verb::kBarrier;
  std::vector<at::Tensor> in, out;
  std::vector<int64_t> in_splits, out_splits;
  ReduceOp reduce = ReduceOp::kSum;
  int peer = -1;
  bool detached = false;
  int message_tag = 0;  // as those of Op
  std::shared_ptr<int> sender = nullptr;
};

// Results are in `out` after wait(). kValue where sizes do not fit together, before anything is sent. Reductions of
// 8-bit floats are formed in fp32.
WorkPtr run_call(Communicator& communicator, ListCall call);

}  // namespace ds::comm
