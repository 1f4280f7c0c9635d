#include "storage/plane_table.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "base/sizes.h"
#include "storage/flat_view.h"
#include "storage/waited.h"

namespace ds::storage {

PlanePtr PlaneTable::find(int32_t number) const {
  if (number < 0 || number >= static_cast<int32_t>(planes_.size()) || !planes_[number]) {
    fail(ErrorKind::kIndex, "there is no plane ", number, " (any more)");
  }
  return planes_[number];
}

PlanePtr PlaneTable::find(int32_t number, plan::Range range, Medium at) const {
  PlanePtr plane = find(number);
  memory_.used(at);
  if (range.begin < 0 || range.end < range.begin || range.end > plane->numel) {
    fail(ErrorKind::kIndex, "plane '", plane->name, "' has ", plane->numel, " elements; [", range.begin, ", ",
         range.end, ") is not among them");
  }
  return plane;
}

// ---- exclusion ----------------------------------------------------------------------------------------------------

void PlaneTable::wait_for_blocks(StorageLock::Held& lock, const Plane& plane, int32_t first, int32_t end, bool alone) {
  const auto busy = [&](const Block& block) { return block.writer || (alone && block.readers > 0); };
  const auto somebody = [&] { return std::any_of(plane.blocks.begin() + first, plane.blocks.begin() + end, busy); };
  if (!plane.removed && somebody()) {
    const Waited waited(memory_.used(plane.part_of(first).medium).waited_seconds, &memory_.clock());
    while (!plane.removed && somebody()) lock_.wait(lock);
  }
  if (plane.removed) fail(ErrorKind::kIndex, "plane '", plane.name, "' has been removed");
}

void PlaneTable::mark(Plane& plane, int32_t first, int32_t end, bool alone) {
  for (int32_t b = first; b < end; ++b) {
    if (alone) {
      plane.blocks[b].writer = true;
    } else {
      ++plane.blocks[b].readers;
    }
  }
}

void PlaneTable::unmark(Plane& plane, int32_t first, int32_t end, bool alone) {
  for (int32_t b = first; b < end; ++b) {
    Block& block = plane.blocks[b];
    if (alone) {
      block.writer = false;
    } else {
      --block.readers;
    }
  }
  lock_.changed();
}

void PlaneTable::add_fence(Plane& plane, int32_t first, int32_t end) noexcept {
  FencePtr on_device;  // of all parts there
  for (const PlanePart& part : plane.parts) {
    if (!part.memory.defined() || part.end <= first || part.first >= end) continue;
    const bool known = on_device && !part.memory.device().is_cpu();
    const FencePtr fence = known ? on_device : fence_after(part.memory);
    if (fence) on_device = fence;
    for (int32_t b = std::max(first, part.first); b < std::min(end, part.end); ++b) plane.blocks[b].fences.add(fence);
  }
}

void PlaneTable::wait_for_streams(const Plane& plane, int32_t first, int32_t end) const {
  if (done_on_return(memory_.device_of(Medium::kDevice))) return;
  for (int32_t b = first; b < end; ++b) {
    const at::Tensor& memory = plane.part_of(b).memory;
    if (!memory.defined() || memory.device().is_cpu()) continue;
    plane.blocks[b].fences.wait(memory);
    if (plane.blocks[b].made_on) wait_for(*plane.blocks[b].made_on, memory);
  }
}

// ---- parts --------------------------------------------------------------------------------------------------------

void PlaneTable::open_parts(StorageLock::Held& lock, Plane& plane, const Placement& placement,
                            std::vector<PlanePart>& parts) {
  for (PlanePart& part : plan_parts(plane, placement)) {
    const bool in_memory = plane.apart && part.medium <= Medium::kHost;
    if (in_memory && (plane.parts.empty() || plane.absent(part.first))) {
      parts.push_back(std::move(part));
      continue;
    }
    PartSpec spec{plane.name, {}, placement, {}, plane.folder};
    for (int32_t b = part.first; b < part.end; ++b) {
      spec.block_bytes.push_back(plane.bytes(b, b + 1));
      if (!plane.block_files.empty()) spec.block_files.push_back(plane.block_files[b]);
    }
    memory_.reserve(lock, part.medium, part.bytes, &MediumUsage::resting, /*may_wait=*/true);
    lock.unlock();
    try {
      if (const at::Tensor* lasting = plane.lasting_of(part)) {
        refill_memory(*lasting, part.bytes);
        part.part = std::make_unique<MemoryPart>(flat_view(*lasting, 0, at::kByte, part.bytes));
      } else {
        part.part = tiers_[static_cast<size_t>(part.medium)]->open(spec);
      }
    } catch (...) {
      lock.lock();
      memory_.used(part.medium).resting -= part.bytes;
      throw;
    }
    lock.lock();
    part.memory = part.part->memory();
    parts.push_back(std::move(part));
  }
}

void PlaneTable::close_parts(Plane& plane, std::vector<PlanePart>& parts) {
  for (PlanePart& part : parts) {
    if (!part.part) continue;
    memory_.used(part.medium).resting -= part.bytes;
    const at::Tensor* lasting = plane.lasting_of(part);
    if (lasting != nullptr && part.memory.defined() && part.memory.is_alias_of(*lasting) && !plane.removed) {
      part.memory.reset();
      empty_memory(*lasting);
    }
  }
  parts.clear();
}

bool PlaneTable::open_absent(StorageLock::Held& lock, Plane& plane, int32_t first, int32_t end, bool zero) {
  bool any = false;
  for (int32_t b = first; b < end; ++b) {
    if (!plane.absent(b)) continue;
    mark(plane, b, b + 1, /*alone=*/false);  // nobody moves it meanwhile
    PlanePart& part = plane.parts[plane.blocks[b].part];
    memory_.reserve(lock, part.medium, part.bytes, &MediumUsage::resting, /*may_wait=*/true);
    lock.unlock();
    std::unique_ptr<Part> made;
    try {
      made = tiers_[static_cast<size_t>(part.medium)]->open({plane.name, {part.bytes}, plane.placement});
      if (zero) made->memory().zero_();
    } catch (...) {
      lock.lock();
      memory_.used(part.medium).resting -= part.bytes;
      unmark(plane, b, b + 1, /*alone=*/false);
      throw;
    }
    lock.lock();
    unmark(plane, b, b + 1, /*alone=*/false);
    if (part.part) {  // another thread was faster
      memory_.used(part.medium).resting -= part.bytes;
      continue;
    }
    part.part = std::move(made);
    part.memory = part.part->memory();
    if (!done_on_return(part.memory.device()))
      plane.blocks[b].made_on =
          c10::impl::VirtualGuardImpl(part.memory.device().type()).getStream(part.memory.device());
    any = true;
  }
  return any;
}

void PlaneTable::close_block(Plane& plane, int32_t block) {
  PlanePart& part = plane.parts[plane.blocks[block].part];
  if (!part.part) return;
  used_here(part.memory);
  memory_.used(part.medium).resting -= part.bytes;
  part.memory.reset();
  part.part.reset();
}

// ---- planes -------------------------------------------------------------------------------------------------------

int32_t PlaneTable::add(std::string name, int64_t numel, at::ScalarType type, const Placement& placement,
                        const Cuts& cuts, const PlaneExtras& extras) {
  const at::Tensor& memory = extras.memory;
  auto plane = std::make_shared<Plane>();
  plane->name = std::move(name);
  plane->numel = numel;
  plane->type = type;
  plane->element = static_cast<int64_t>(c10::elementSize(type));
  plane->placement = placement;
  if (numel < 0) fail(ErrorKind::kValue, "plane '", plane->name, "' has ", numel, " elements");
  sizes::product("bytes of a plane", numel, plane->element);
  plane->blocks = make_blocks(plane->name, numel, cuts);
  memory_.used(placement.work);
  plane->block_files = extras.block_files;
  plane->folder = extras.folder;
  plane->user = extras.copies.number;
  plane->apart = extras.apart;
  if (!plane->block_files.empty() && plane->block_files.size() != plane->blocks.size()) {
    fail(ErrorKind::kValue, "plane '", plane->name, "' has ", plane->blocks.size(), " blocks, and names of ",
         plane->block_files.size(), " files");
  }
  auto lock = lock_.hold();
  std::vector<PlanePart> parts;
  if (memory.defined()) {
    const bool memory_rests = placement.rest == placement.work && placement.rest <= Medium::kHost &&
                              memory.device() == memory_.device_of(placement.rest);
    if (extras.apart || memory.numel() != numel || memory.scalar_type() != type || !memory.is_contiguous() ||
        !memory_rests) {
      fail(ErrorKind::kValue, "plane '", plane->name, "' brings memory along: ", numel, " contiguous elements of ",
           c10::toString(type), " that rest on the device or on the host, whole");
    }
    parts = plan_parts(*plane, placement);
    memory_.reserve(lock, placement.rest, parts[0].bytes, &MediumUsage::resting, /*may_wait=*/true);
    parts[0].memory = flat_view(memory, memory.storage_offset() * plane->element, at::kByte, parts[0].bytes);
    parts[0].part = std::make_unique<MemoryPart>(parts[0].memory);
    plane->lasting.push_back({placement.rest, 0, plane->block_count(), memory});
  } else {
    try {
      open_parts(lock, *plane, placement, parts);
    } catch (...) {
      close_parts(*plane, parts);
      throw;
    }
  }
  plane->swap_parts(parts);
  add_fence(*plane, 0, plane->block_count());  // torch's allocator may hand out memory that the stream still uses
  planes_.push_back(std::move(plane));
  return static_cast<int32_t>(planes_.size()) - 1;
}

void PlaneTable::remove(int32_t number) {
  const PlanePtr plane = std::exchange(planes_[number], nullptr);
  plane->removed = true;
  close_parts(*plane, plane->parts);
  plane->lasting.clear();
  plane->folder.reset();
}

at::Tensor PlaneTable::resident(StorageLock::Held& lock, int32_t number, plan::Range range) {
  const PlanePtr plane = find(number, range, Medium::kDevice);
  const auto [first, end] = plane->blocks_of(range);
  open_absent(lock, *plane, first, end, /*zero=*/true);
  const PlanePart& part = plane->part_of(first);
  if (end > part.end || !part.memory.defined()) {
    fail(ErrorKind::kRuntime, "plane '", plane->name, "' does not rest in memory, whole: acquire leases of it");
  }
  if (plane->apart) {
    wait_for_streams(*plane, first, end);
    const int64_t offset = part.memory.storage_offset() + (range.begin - part.begin) * plane->element;
    return flat_view(part.memory, offset, plane->type, range.numel());
  }
  const at::Tensor* found = plane->lasting_of(part);
  if (found == nullptr) {
    for (const Lasting& other : plane->lasting) {
      if (other.end <= part.first || other.first >= part.end) continue;
      fail(ErrorKind::kRuntime, "plane '", plane->name, "' rests in the tier '", name_of(part.medium),
           "', and its lasting view is one of '", name_of(other.medium), "': move it back first");
    }
    const int64_t numel = part.bytes / plane->element;
    plane->lasting.push_back(
        {part.medium, part.first, part.end, flat_view(part.memory, part.memory.storage_offset(), plane->type, numel)});
    found = &plane->lasting.back().memory;
  }
  wait_for_streams(*plane, first, end);
  if (range.numel() == found->numel()) return *found;
  return flat_view(*found, (found->storage_offset() + range.begin - part.begin) * plane->element, plane->type,
                   range.numel());
}

StagingPtr PlaneTable::take_oldest_prefetched(Medium medium, int32_t user) const {
  const auto matches = [&](const StagingPtr& copy) {
    return !copy->fetching && copy->medium == medium && (user < 0 || copy->user == user);
  };
  for (const PlanePtr& plane : planes_) {
    if (!plane) continue;
    const auto found = find_if(plane->prefetched, matches);
    if (found == plane->prefetched.end()) continue;
    const StagingPtr copy = *found;
    plane->prefetched.erase(found);
    return copy;
  }
  return nullptr;
}

}  // namespace ds::storage
