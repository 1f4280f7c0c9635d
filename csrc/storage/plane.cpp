#include "storage/plane.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>

#include "base/error.h"

namespace ds::storage {

std::pair<int32_t, int32_t> Plane::blocks_of(plan::Range range) const {
  if (range.begin == range.end) return {0, 0};
  if (blocks.size() == 1) return {0, 1};
  const auto ends_after = [](int64_t element, const Block& block) { return element < block.end; };
  const auto first = std::upper_bound(blocks.begin(), blocks.end(), range.begin, ends_after);
  auto last = first;
  if (last->end < range.end) last = std::upper_bound(first, blocks.end(), range.end - 1, ends_after);
  return {static_cast<int32_t>(first - blocks.begin()), static_cast<int32_t>(last - blocks.begin()) + 1};
}

const PlanePart* Plane::resting(int32_t first, int32_t end, Medium at) const {
  if (first == end) return nullptr;
  const PlanePart& part = parts[blocks[first].part];
  return part.medium == at && end <= part.end && part.memory.defined() ? &part : nullptr;
}

std::vector<Block> make_blocks(const std::string& name, int64_t numel, const Cuts& cuts) {
  std::vector<Block> blocks;
  int64_t begin = 0;
  for (const int64_t end : cuts.empty() ? Cuts{numel} : cuts) {
    if (end <= begin && !(numel == 0 && cuts.empty())) {
      fail(ErrorKind::kValue, "plane '", name, "': cuts must rise, and ", end, " comes after ", begin);
    }
    Block block;
    block.begin = begin;
    block.end = begin = end;
    blocks.push_back(std::move(block));
  }
  if (begin != numel) {
    fail(ErrorKind::kValue, "plane '", name, "' has ", numel, " elements, and its last cut is at ", begin);
  }
  return blocks;
}

std::vector<PlanePart> plan_parts(const Plane& plane, const Placement& placement) {
  if (!(placement.host_share >= 0.0 && placement.host_share <= 1.0)) {
    fail(ErrorKind::kValue, "plane '", plane.name, "': a share is from 0 to 1, not ", placement.host_share);
  }
  const auto count = static_cast<int32_t>(plane.blocks.size());
  int32_t shared = 0;
  while (shared < count && static_cast<double>(plane.blocks[shared].end) <=
                               placement.host_share * static_cast<double>(plane.numel) + 0.5) {
    ++shared;
  }
  if (placement.rest == placement.work) shared = count;
  std::vector<PlanePart> parts;
  for (const auto& [first, end, medium] :
       {std::make_tuple(0, shared, placement.rest), std::make_tuple(shared, count, placement.work)}) {
    if (first == end) continue;
    PlanePart part{medium, first, end, plane.blocks[first].begin, plane.bytes(first, end), nullptr, {}};
    parts.push_back(std::move(part));
  }
  return parts;
}

void check_can_empty(const Plane& plane) {
  const bool there = plane.lasting.defined() && plane.parts.size() == 1 && plane.parts[0].memory.defined() &&
                     plane.parts[0].memory.is_alias_of(plane.lasting);
  if (!there) return;
  const c10::Storage& storage = plane.lasting.storage();
  const auto bytes = static_cast<size_t>(plane.numel * plane.element);
  if (storage.unsafeGetStorageImpl()->allocator() == nullptr || storage.nbytes() != bytes) {
    fail(ErrorKind::kValue, "plane '", plane.name, "' cannot move: its ", bytes,
         " bytes are part of memory that others use or that does not come from torch's allocator. Make it of memory of "
         "its own.");
  }
}

void empty_memory(const at::Tensor& tensor) {
  const c10::DeviceGuard current(tensor.device());
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(0));
  storage->set_nbytes(size_t{0});
}

void refill_memory(const at::Tensor& tensor, int64_t bytes) {
  const c10::DeviceGuard current(tensor.device());
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(static_cast<size_t>(bytes)));
  storage->set_nbytes(static_cast<size_t>(bytes));
}

}  // namespace ds::storage
