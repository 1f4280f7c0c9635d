// A parameter group in the layout that checkpoints of ZeRO stages 1 and 2 have: its parameters end to end, in the order of
// the optimizer, cut into one partition of `size` elements for each rank.
//
// The engine keeps them in other places: bucket by bucket, each bucket in rows. pack() lays out what this rank gives to
// each other one, an uneven all-to-all carries it, unpack() puts it in place: one collective for each kind of tensor.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "plan/repartition.h"
#include "zero/param_store.h"

namespace ds::zero {

class GroupCut {
 public:
  // Fails when size * ranks is less than the group's elements.
  GroupCut(const ParamStore& store, int32_t group, int64_t size);

  // `pieces`: one tensor for each piece that this rank owns (ParamStore::pieces), undefined where it has none: zeros are
  // sent then. Those of other groups are not looked at. Returns one dimension of fp32, or fp64 for fp64 parameters.
  at::Tensor pack(const std::vector<at::Tensor>& pieces) const;
  // What pack() of all ranks has given to this one, in rank order, becomes its partition; the padding is zero.
  at::Tensor unpack(const at::Tensor& taken) const;

  const std::vector<int64_t>& give_numels() const { return plan_.give_numels; }
  const std::vector<int64_t>& take_numels() const { return plan_.take_numels; }

 private:
  int64_t size_;
  at::TensorOptions options_;
  plan::Repartition plan_;
};

}  // namespace ds::zero
