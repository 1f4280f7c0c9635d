// The masters and states of a checkpoint, read from their placements when the file is written.
#pragma once
#include <memory>
#include <vector>

#include "zero/states/state_access.h"
#include "zero/states/state_source.h"

namespace ds::zero {

// Outlived by both. Sources keep `owner`, which keeps both.
class StateSources {
 public:
  StateSources(const ParamStore& store, StateAccess& states) : store_(store), states_(states) {}

  // StateAccess::padded_slices of a kind.
  std::shared_ptr<StateSource> padded(std::shared_ptr<const void> owner, StateKind kind, int slot,
                                      const std::vector<size_t>& params) const;
  // The elements of one piece, by its number. Null: no such slot.
  std::shared_ptr<StateSource> piece(std::shared_ptr<const void> owner, StateKind kind, int slot, size_t number) const;
  // Shape and type of a piece that rests in a file, a tensor of the device "meta"; undefined: it does not.
  at::Tensor piece_in_file(StateKind kind, int slot, size_t number) const;
  // Masters, or states of the optimizer, as far as they have been made.
  bool rest_in_files() const;

 private:
  const ParamStore& store_;
  StateAccess& states_;
};

}  // namespace ds::zero
