// Parameters that share an index space and one set of buckets.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "plan/shard_map.h"
#include "storage/shard_storage.h"
#include "zero/offload/placements.h"
#include "zero/spaces/space_ranks.h"

namespace ds::zero {

// A plane of the engine's storage.
struct Buffer {
  storage::PlaneId plane;
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  bool full = false;  // layout: the full space, or this rank's shard
  at::Tensor data;    // all of it, one-dimensional, where it rests on the device in one piece; else undefined
  // On the device, and the block of each bucket has memory of its own while it is needed: see [Note: memory of
  // gradients] in param_store.h.
  bool apart = false;

  bool exists() const { return plane.number >= 0; }
  bool on_device() const { return apart || data.defined(); }  // else leases of it are copies
  bool is(const Buffer& other) const { return plane.number == other.plane.number; }
  int64_t bytes() const { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
};

// Parameters with equal keys lie in one space.
struct SpaceKey {
  int32_t param_group;
  at::ScalarType dtype;
  SpaceRanks ranks;
  Placements placements;  // of its buffers
};

inline bool operator==(const SpaceKey& a, const SpaceKey& b) {
  return a.param_group == b.param_group && a.dtype == b.dtype && a.ranks == b.ranks && a.placements == b.placements;
}

struct ParamSpace {
  explicit ParamSpace(SpaceKey of) : key(std::move(of)) {}

  const SpaceKey key;
  std::vector<int32_t> params;  // indices into ParamStore, in layout order
  plan::ShardMap map;
  std::vector<size_t> owned;  // extents of this rank, by shard_offset
  // This rank owns everything, end to end: the full space is the shard space. Gradients are summed where they lie.
  bool in_place = false;
  Buffer lp;      // the values the model computes with; on the device, unless they are slices of parameters
  Buffer master;  // fp32; the same buffer as lp where the model computes in fp32 (or fp64) and both rest alike
  Buffer grad;    // reduced gradients, of StoreOptions::grad_dtype
  Buffer local;   // full space, on the device: gradients not reduced yet; may be `grad`, see split_grad_buffer
  std::vector<Buffer> slots;  // optimizer states, fp32, created by the stepper

  const SpaceRanks& ranks() const { return key.ranks; }
  int64_t rank() const { return key.ranks.shard->rank(); }  // the owner of this shard
  bool has_masters() const { return !master.is(lp); }       // apart from lp
  // The reduced gradients lie among the local ones.
  bool grad_aliased() const { return !in_place && local.exists() && grad.full; }
  // The model's parameters are whole on every rank, and each updates its shard of them.
  bool gathers_after_step() const { return ranks().shard->size() > 1 && lp.full; }
  // Position of an owned extent, or of an element run of one bucket's own row, in a buffer.
  int64_t offset_in(const Buffer& buffer, const plan::Extent& extent) const {
    return buffer.full ? extent.full_offset : extent.shard_offset;
  }
  int64_t offset_in(const Buffer& buffer, const plan::Bucket& bucket, int64_t shard_offset) const {
    return buffer.full ? map.full_offset(bucket, rank(), shard_offset) : shard_offset;
  }
  // All that a buffer has of a bucket.
  plan::Range block_in(const Buffer& buffer, const plan::Bucket& bucket) const {
    if (!buffer.full) return {bucket.shard_begin, bucket.shard_end};
    return {map.full_begin(bucket), map.full_end(bucket)};
  }
  // This rank's row of a bucket in a buffer.
  plan::Range row_in(const Buffer& buffer, const plan::Bucket& bucket) const {
    const int64_t begin = offset_in(buffer, bucket, bucket.shard_begin);
    return {begin, begin + bucket.shard_end - bucket.shard_begin};
  }
};

}  // namespace ds::zero
