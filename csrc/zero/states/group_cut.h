// A parameter group in the layout that checkpoints of ZeRO stages 1 and 2 have: its dense parameters end to end, in the
// order of the optimizer, cut into equal partitions with an even number of elements, one for each rank. What is left
// behind the last parameter is padding.
//
// The engine keeps them in another order: bucket by bucket, each bucket in rows. Each rank lays out what it gives to
// each other one, an uneven all-to-all carries it, and the receiver copies it to its position: one collective for each
// kind of tensor.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/repartition.h"
#include "plan/saved_layout.h"
#include "zero/states/state_access.h"
#include "zero/states/state_source.h"

namespace ds::zero {

class GroupCut {
 public:
  // Both outlive it. Parameters of other rules than "dense", which have ranks of their own, are left out.
  GroupCut(const ParamStore& store, StateAccess& states, int32_t group);

  int64_t size() const { return size_; }    // elements of a partition
  int64_t owned() const { return owned_; }  // of this rank's that are not padding
  size_t first() const { return first_; }   // the group's first parameter

  // `pieces`: one tensor for each piece that this rank owns (ParamStore::pieces), undefined where it has none, which
  // means zeros. Those of other groups are not looked at.

  // This rank's partition, fp32 (fp64 for fp64 parameters), padding zero, on the CPU. Every rank calls it.
  at::Tensor partition(const std::vector<at::Tensor>& pieces) const;
  // The first `numel` elements of the same as (where they begin, flat fp32 tensor) over the memory of the pieces,
  // ascending; what none covers is zero. Unset where they cannot be taken as they are: on several ranks, of another
  // dtype, or in another order.
  using Part = std::pair<int64_t, at::Tensor>;
  std::optional<std::vector<Part>> in_pieces(const std::vector<at::Tensor>& pieces, int64_t numel) const;

  // The same of what rests in files, read when it is written down: row by row from there, or where ranks exchange it
  // first, from a file on the same drive in which it waits. No more than a few rows are in memory for it. Null where
  // the kind does not rest in files. Every rank calls it, and takes part to the end: what one of them cannot read or
  // write is thrown there alone, and the others can go on.
  io::SourcePtr source(std::shared_ptr<const void> owner, StateKind kind, int slot, int64_t numel) const;
  at::ScalarType type() const { return c10::typeMetaToScalarType(options_.dtype()); }  // of its elements

  struct Slice {
    size_t param;
    int64_t at, numel;  // `at` within the partition
    int64_t offset;     // within the parameter
  };
  std::vector<Slice> slices() const;  // of parameters that have a part in this rank's partition

 private:
  std::vector<int64_t> numels_in_row() const;
  bool in_row(size_t param) const;
  bool in_file_order(size_t param) const;
  std::string folder_of(StateKind kind, int slot) const;
  void exchange_bucket(const ParamSpace& space, int32_t bucket, const Buffer& from, class Collecting& into) const;
  void exchange_whole(size_t param, const Buffer& from, class Collecting& into) const;

  const ParamStore& store_;
  StateAccess& states_;
  int64_t start_of(size_t param) const { return layout_.begin(param - first_); }  // in the row of all partitions

  size_t first_ = 0, last_ = 0;
  plan::SavedLayout layout_;  // of the group's parameters; those that are left out have no elements in it
  int64_t size_ = 0, owned_ = 0;
  at::TensorOptions options_;
  plan::Repartition plan_;
};

}  // namespace ds::zero
