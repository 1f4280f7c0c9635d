// The flags that ranks exchange when a backward has ended: the parameters that any of them has used, the gradients that
// came too late for their buckets, the ranks that could not compute their gradients, and whether they train alike.
//
// Parameters of one set of ranks travel together; failures and agreement travel to every rank of the engine, with the
// set of everyone. Where all spaces have the same ranks, as those of dense parameters do, that is one all-reduce.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "zero/gradients/agreement.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

struct BackwardFlags {
  std::vector<float> used;              // of each parameter: ranks that have a gradient
  std::vector<float> late;              // of each bucket: gradients that came after it had left
  std::array<float, 2> failed_ranks{};  // how many, and the sum of rank + 1
  Agreement::Bits agreed{};
};

class FlagExchange {
 public:
  // `space_of_bucket`: of each bucket, in the order of BackwardFlags::late.
  FlagExchange(const ParamStore& store, const std::vector<int32_t>& space_of_bucket);

  void sum(BackwardFlags& flags) const;

 private:
  const ParamStore& store_;
  std::vector<std::vector<int32_t>> buckets_;  // of each set of the store
};

}  // namespace ds::zero
