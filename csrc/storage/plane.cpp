#include "storage/plane.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>

#include "base/error.h"
#include "storage/alignment.h"

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

void Plane::swap_parts(std::vector<PlanePart>& next) {
  std::swap(parts, next);
  for (size_t p = 0; p < parts.size(); ++p) {
    for (int32_t b = parts[p].first; b < parts[p].end; ++b) blocks[b].part = static_cast<int32_t>(p);
  }
}

StagingPtr Plane::new_copy(int32_t first, int32_t end, Medium at) const {
  auto staging = std::make_shared<Staging>();
  staging->medium = at;
  staging->first = first;
  staging->end = end;
  staging->user = user;
  staging->bytes = copy_bytes(bytes(first, end));
  return staging;
}

const PlanePart* Plane::resting(int32_t first, int32_t end, Medium at) const {
  if (first == end) return nullptr;
  const PlanePart& part = part_of(first);
  return part.medium == at && end <= part.end && part.memory.defined() ? &part : nullptr;
}

bool Plane::in_memory(int32_t first, int32_t end, Medium at) const {
  for (int32_t b = first; b < end; ++b)
    if (part_of(b).medium != at) return false;
  return at <= Medium::kHost;
}

const at::Tensor* Plane::lasting_of(const PlanePart& part) const {
  for (const Lasting& one : lasting)
    if (one.medium == part.medium && one.first == part.first && one.end == part.end) return &one.memory;
  return nullptr;
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
  for (const double share : {placement.host_share, placement.file_share}) {
    if (!(share >= 0.0 && share <= 1.0))
      fail(ErrorKind::kValue, "plane '", plane.name, "': a share is from 0 to 1, not ", share);
  }
  const int32_t count = plane.block_count();
  const auto within = [&](double share) {  // number of blocks, from the first on
    int32_t fitting = 0;
    while (fitting < count &&
           static_cast<double>(plane.blocks[fitting].end) <= share * static_cast<double>(plane.numel) + 0.5) {
      ++fitting;
    }
    return fitting;
  };
  const int32_t filed = placement.file_share > 0.0 ? within(placement.file_share) : 0;
  const int32_t shared = placement.rest == placement.work ? count : within(placement.file_share + placement.host_share);
  std::vector<PlanePart> parts;
  for (const auto& [first, end, medium] :
       {std::make_tuple(0, filed, Medium::kFile), std::make_tuple(filed, shared, placement.rest),
        std::make_tuple(shared, count, placement.work)}) {
    if (first == end) continue;
    const int32_t length = plane.apart && medium <= Medium::kHost ? 1 : end - first;
    for (int32_t b = first; b < end; b += length) {
      PlanePart part{medium, b, b + length, plane.blocks[b].begin, plane.bytes(b, b + length), nullptr, {}};
      parts.push_back(std::move(part));
    }
  }
  return parts;
}

void check_can_empty(const Plane& plane) {
  for (const PlanePart& part : plane.parts) {
    const at::Tensor* lasting = plane.lasting_of(part);
    if (lasting == nullptr || !part.memory.defined() || !part.memory.is_alias_of(*lasting)) continue;
    const c10::Storage& storage = lasting->storage();
    if (storage.unsafeGetStorageImpl()->allocator() == nullptr || storage.nbytes() != static_cast<size_t>(part.bytes)) {
      fail(ErrorKind::kValue, "plane '", plane.name, "' cannot move: its ", part.bytes,
           " bytes are part of memory that others use or that does not come from torch's allocator. Make it of memory "
           "of its own.");
    }
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
