// One buffer, its blocks, and where they rest.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/folders/run_folder.h"
#include "plan/range.h"
#include "storage/failure.h"
#include "storage/fence.h"
#include "storage/tier.h"
#include "storage/usage.h"

namespace ds::storage {

struct Block {
  int64_t begin = 0, end = 0;  // elements
  int32_t part = 0;
  int32_t readers = 0;  // leases and fetches
  bool writer = false;  // a lease, its write back, or a move
  Fences fences;
  std::optional<c10::Stream> made_on;  // of a block that lies apart: its memory
  FailurePtr error;                    // why it has no contents
};

// Blocks [first, end) rest together. Without `part`: one block of a plane whose blocks lie apart, which has no memory.
struct PlanePart {
  Medium medium;
  int32_t first, end;
  int64_t begin;  // element
  int64_t bytes;
  std::unique_ptr<Part> part;
  at::Tensor memory;  // its bytes, where there are any to address
};

// A copy of blocks [first, end) in memory where somebody works on it; or scratch.
struct Staging {
  Medium medium = Medium::kDevice;
  int32_t first = 0, end = 0;
  int64_t bytes = 0;   // that are counted
  at::Tensor memory;   // these bytes
  int64_t offset = 0;  // of the first block in them: aligned
  int32_t user = 0;    // its limit and its idle memory are those of this user of scratch
  int64_t MediumUsage::*kind = &MediumUsage::staged;
  bool fetching = false;
  FencePtr ready;
};
using StagingPtr = std::shared_ptr<Staging>;

// Memory of blocks [first, end) that resident() has given out, or that was brought along: valid over moves.
struct Lasting {
  Medium medium;
  int32_t first, end;
  at::Tensor memory;
};

struct Plane {
  std::string name;
  int64_t numel = 0;
  at::ScalarType type = at::kFloat;
  int64_t element = 4;  // bytes
  Placement placement;
  std::vector<Block> blocks;
  std::vector<PlanePart> parts;
  std::vector<StagingPtr> prefetched;  // oldest first
  std::vector<Lasting> lasting;
  bool removed = false;
  std::vector<std::string> block_files;  // see PlaneExtras, and the next two
  std::shared_ptr<io::RunFolder> folder;
  int32_t user = 0;
  bool apart = false;  // see PlaneExtras

  // The blocks that a range touches, as [first, end).
  std::pair<int32_t, int32_t> blocks_of(plan::Range range) const;
  int32_t block_count() const { return static_cast<int32_t>(blocks.size()); }
  const PlanePart& part_of(int32_t block) const { return parts[blocks[block].part]; }
  // Whether the block has no memory, and no contents, now.
  bool absent(int32_t block) const { return apart && !part_of(block).part; }
  // Gives the blocks to these parts; the old parts are in `next` afterwards.
  void swap_parts(std::vector<PlanePart>& next);
  // A copy of these blocks, without memory yet.
  StagingPtr new_copy(int32_t first, int32_t end, Medium at) const;
  bool covers(plan::Range range, int32_t block) const {
    return range.begin <= blocks[block].begin && range.end >= blocks[block].end;
  }
  // The part in whose memory all these blocks rest, there; null: they have to be copied.
  const PlanePart* resting(int32_t first, int32_t end, Medium at) const;
  // Whether these blocks, which lie apart, are in that memory, or will be.
  bool in_memory(int32_t first, int32_t end, Medium at) const;
  // The lasting view of exactly these blocks there, if there is one.
  const at::Tensor* lasting_of(const PlanePart& part) const;
  int64_t bytes(int32_t first, int32_t end) const {
    return first == end ? 0 : (blocks[end - 1].end - blocks[first].begin) * element;
  }
};
using PlanePtr = std::shared_ptr<Plane>;

// Throws ErrorKind::kValue for cuts that do not rise or do not end where the plane ends.
std::vector<Block> make_blocks(const std::string& name, int64_t numel, const Cuts& cuts);

// The placement of blocks, without memory yet. `part` of the blocks is left alone.
std::vector<PlanePart> plan_parts(const Plane& plane, const Placement& placement);

// Throws ErrorKind::kValue where the plane rests in memory that somebody else has, and it cannot be freed and come
// back: others see more of it, or it is nobody's to free.
void check_can_empty(const Plane& plane);
// Memory of a tensor that stays valid: frees it, and allocates as much again.
void empty_memory(const at::Tensor& tensor);
void refill_memory(const at::Tensor& tensor, int64_t bytes);

}  // namespace ds::storage
