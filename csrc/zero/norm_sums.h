// How sums of squares of the spaces of an engine become one, over all ranks.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "zero/param_store.h"

namespace ds::zero {

// Of each set of spaces but the first, `squares` has a sum of this rank's: it is added up over the ranks that the set
// names and goes into *total, whose first element already has that of the first set over all ranks. `model_parallel`,
// null for nobody: the ranks that hold other parts of the model; sets that have these among their own come after them.
inline void add_sets(const std::vector<SpaceSet>& sets, const at::Tensor& squares, const at::Tensor& total,
                     comm::Communicator* model_parallel) {
  const auto add = [](comm::Communicator& ranks, const at::Tensor& tensor) {
    if (ranks.size() > 1) ranks.all_reduce(tensor, comm::ReduceOp::kSum, "gradient norm")->wait();
  };
  for (const bool wide : {false, true}) {
    if (wide && model_parallel != nullptr) add(*model_parallel, total);
    for (size_t set = 1; set < sets.size(); ++set) {
      if (sets[set].ranks.norm_has_model_parallel != wide) continue;
      const at::Tensor sum = squares.narrow(0, static_cast<int64_t>(set) - 1, 1);
      for (const comm::CommunicatorPtr& ranks : sets[set].ranks.norm_over) add(*ranks, sum);
      total.narrow(0, 0, 1).add_(sum);
    }
  }
}

}  // namespace ds::zero
