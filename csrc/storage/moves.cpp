// Planes that go to another placement, and views of them that last.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "storage/flat_view.h"
#include "storage/storage_state.h"

namespace ds::storage {
namespace {

// Whether tensors that were given out are at their destination already.
bool stays(const Plane& plane, const Placement& placement) {
  const std::vector<PlanePart> planned = plan_parts(plane, placement);
  return !plane.lasting.empty() && planned.size() == plane.parts.size() &&
         std::equal(planned.begin(), planned.end(), plane.parts.begin(), [](const PlanePart& a, const PlanePart& b) {
           return a.medium == b.medium && a.first == b.first && a.end == b.end && b.memory.defined();
         });
}

}  // namespace

at::Tensor StorageState::resident(int32_t number, plan::Range range) {
  const Lock lock(mutex_);
  const PlanePtr plane = plane_of(number);
  check_range(*plane, range, Medium::kDevice);
  const auto [first, end] = plane->blocks_of(range);
  const PlanePart& part = plane->parts[plane->blocks[first].part];
  if (end > part.end || !part.memory.defined()) {
    fail(ErrorKind::kRuntime, "plane '", plane->name, "' does not rest in memory, whole: acquire leases of it");
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

std::vector<at::Tensor> StorageState::memory(int32_t number) const {
  const Lock lock(mutex_);
  std::vector<at::Tensor> found;
  for (const PlanePart& part : plane_of(number)->parts)
    if (part.memory.defined()) found.push_back(part.memory);
  return found;
}

void StorageState::move(std::vector<int32_t> numbers, const Placement& placement, bool wait_each) {
  std::sort(numbers.begin(), numbers.end());  // so that two movers never wait for each other
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  Lock lock(mutex_);
  account(placement.rest);
  account(placement.work);
  std::vector<PlanePtr> planes;
  for (const int32_t number : numbers) planes.push_back(plane_of(number));
  size_t locked = 0;
  std::vector<std::vector<PlanePart>> moved(planes.size());
  const auto unlock_planes = [&] {
    for (size_t p = 0; p < locked; ++p) {
      unmark(*planes[p], 0, static_cast<int32_t>(planes[p]->blocks.size()), /*alone=*/true, nullptr);
    }
  };
  try {
    for (const PlanePtr& plane : planes) {
      lock_planes(lock, {plane});
      ++locked;
    }
    for (const PlanePtr& plane : planes) {
      for (const Block& block : plane->blocks)
        if (block.error) block.error->raise();
      if (!stays(*plane, placement)) check_can_empty(*plane);
    }
    for (size_t p = 0; p < planes.size(); ++p) {
      if (!stays(*planes[p], placement)) open_parts(lock, *planes[p], placement, moved[p]);
    }
    for (const PlanePtr& plane : planes) wait_for_streams(*plane, 0, static_cast<int32_t>(plane->blocks.size()));
    lock.unlock();
    for (size_t p = 0; p < planes.size(); ++p) copy_plane(*planes[p], moved[p], wait_each);
    if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
    lock.lock();
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    for (size_t p = 0; p < planes.size(); ++p) close_parts(*planes[p], moved[p]);
    unlock_planes();
    throw;
  }
  for (size_t p = 0; p < planes.size(); ++p) {
    Plane& plane = *planes[p];
    plane.placement = placement;
    if (moved[p].empty()) continue;
    std::swap(plane.parts, moved[p]);
    for (size_t i = 0; i < plane.parts.size(); ++i)
      for (int32_t b = plane.parts[i].first; b < plane.parts[i].end; ++b)
        plane.blocks[b].part = static_cast<int32_t>(i);
    close_parts(plane, moved[p]);
  }
  unlock_planes();
}

}  // namespace ds::storage
