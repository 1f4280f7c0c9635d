// Memory of an engine's slices and of their copies, as far as ranks share it, and the source that gathers from it.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "zero/gathers/param_gatherer.h"
#include "zero/gathers/slice_copier.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

class SliceMemory {
 public:
  // `codes`: slices travel as codes (ZeRO++ qwZ). `threads`: of the CPU's kernels.
  SliceMemory(bool codes, int threads) : codes_(codes), threads_(threads) {}

  // StoreOptions::allocate.
  at::Tensor allocate(int64_t bytes, c10::Device device, const comm::CommunicatorPtr& ranks);
  // Makes the copies that are gathered instead of slices; null: there are none. Before source().
  SliceCopierPtr make_copies(const ParamStore& store);
  // `publications`: those of earlier sources, ParamGatherer::publications().
  ShardSourcePtr source(const ParamStore& store, int64_t publications = 0) const;
  // Parameters that are not trained rest as codes from now on, and the gatherer reads these. Frozen ones that are in
  // the store take the values that codes hold; `adopt` brings them to the masters. All ranks, while nobody reads
  // slices.
  void code_frozen(ParamStore& store, ParamGatherer& gatherer, const std::function<void()>& adopt);

 private:
  std::vector<GatherGroup> groups_of(const ParamStore& store, size_t number, const ShardedGroup& group,
                                     int64_t publications) const;

  const bool codes_;
  const int threads_;
  std::vector<comm::PeerMemoryPtr> peers_;  // of each group of the store's sharded parameters; null: ranks share none
  std::vector<comm::PeerMemoryPtr> code_peers_;  // of the codes of each of these groups
  comm::CommunicatorPtr second_ranks_;           // that have a second copy together
  comm::PeerMemoryPtr second_peers_;             // of the second copy
};

}  // namespace ds::zero
