#include "storage/storage_state.h"

#include <algorithm>

#include "base/ranges.h"

namespace ds::storage {
namespace {

// Whether tensors that were given out, and blocks that lie apart, are at their destination already.
bool stays(const Plane& plane, const Placement& placement) {
  const std::vector<PlanePart> planned = plan_parts(plane, placement);
  return (plane.apart || !plane.lasting.empty()) && planned.size() == plane.parts.size() &&
         std::equal(planned.begin(), planned.end(), plane.parts.begin(), [&](const PlanePart& a, const PlanePart& b) {
           return a.medium == b.medium && a.first == b.first && a.end == b.end && (b.memory.defined() || plane.apart);
         });
}

}  // namespace

StorageState::StorageState(c10::Device device, const Budget& budget, const FileAccess& files)
    : device(device),
      tiers(make_tiers({device, files, budget.scratch})),
      memory(lock, tiers, device, budget,
             [this](Medium medium, int32_t user) { return planes.take_oldest_prefetched(medium, user); }),
      planes(lock, memory, tiers),
      copies(lock, memory, device),
      prefetches(lock, memory, planes, copies, background),
      leases(lock, memory, planes, copies, prefetches, background),
      background(lock, budget.transfer_threads, /*at_once=*/device.is_meta()) {}  // copies on meta take no time

void StorageState::lock_plane(StorageLock::Held& held, Plane& plane) {
  planes.wait_for_blocks(held, plane, 0, plane.block_count(), /*alone=*/true);
  planes.mark(plane, 0, plane.block_count(), /*alone=*/true);
  prefetches.drop(plane, 0, plane.block_count());
}

void StorageState::remove(int32_t number) {
  auto held = lock.hold();
  const PlanePtr plane = planes.find(number);
  lock_plane(held, *plane);
  planes.remove(number);
  lock.changed();
}

void StorageState::discard(int32_t number, plan::Range range) {
  auto held = lock.hold();
  const PlanePtr plane = planes.find(number, range, Medium::kHost);
  const auto [first, end] = plane->blocks_of(range);
  planes.wait_for_blocks(held, *plane, first, end, /*alone=*/true);
  prefetches.drop(*plane, first, end);
  for (int32_t b = first; b < end; ++b) {
    if (!plane->covers(range, b)) continue;
    const PlanePart& part = plane->part_of(b);
    if (plane->apart && part.medium <= Medium::kHost) {
      planes.close_block(*plane, b);
    } else {
      part.part->discard(static_cast<size_t>(b - part.first));
    }
  }
}

bool StorageState::occupy(int32_t number, plan::Range range) {
  auto held = lock.hold();
  const PlanePtr plane = planes.find(number, range, Medium::kDevice);
  const auto [first, end] = plane->blocks_of(range);
  return planes.open_absent(held, *plane, first, end, /*zero=*/false);
}

void StorageState::move(std::vector<int32_t> numbers, const Placement& placement, bool wait_each) {
  sort_unique(numbers);  // so that two movers never wait for each other
  struct Moving {
    PlanePtr plane;
    bool locked = false;
    std::vector<PlanePart> parts{};  // the next ones, and then the old ones
  };
  auto held = lock.hold();
  memory.used(placement.rest);
  memory.used(placement.work);
  std::vector<Moving> all;
  for (const int32_t number : numbers) all.push_back({planes.find(number)});
  const auto unlock_planes = [&] {
    for (const auto& [plane, locked, parts] : all)
      if (locked) planes.unmark(*plane, 0, plane->block_count(), /*alone=*/true);
  };
  try {
    for (Moving& one : all) {
      lock_plane(held, *one.plane);
      one.locked = true;
    }
    for (const Moving& one : all) {
      for (const Block& block : one.plane->blocks)
        if (block.error) block.error->raise();
      if (!stays(*one.plane, placement)) check_can_empty(*one.plane);
    }
    for (auto& [plane, locked, parts] : all)
      if (!stays(*plane, placement)) planes.open_parts(held, *plane, placement, parts);
    for (const Moving& one : all) planes.wait_for_streams(*one.plane, 0, one.plane->block_count());
    held.unlock();
    for (const Moving& one : all) copies.copy_plane(*one.plane, one.parts, wait_each);
    if (!done_on_return(device)) c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
    held.lock();
  } catch (...) {
    if (!held.owns_lock()) held.lock();
    for (Moving& one : all) planes.close_parts(*one.plane, one.parts);
    unlock_planes();
    throw;
  }
  for (auto& [plane, locked, parts] : all) {
    plane->placement = placement;
    if (parts.empty()) continue;
    plane->swap_parts(parts);
    planes.close_parts(*plane, parts);
  }
  unlock_planes();
}

void StorageState::close() {
  if (!owner.here()) return;
  const auto held = lock.hold();
  const auto busy = [](const Block& block) { return block.writer || block.readers > 0; };
  for (size_t number = 0; number < planes.all().size(); ++number) {
    const PlanePtr plane = planes.all()[number];
    if (!plane || any_of(plane->blocks, busy)) continue;
    prefetches.drop(*plane, 0, plane->block_count());
    planes.remove(static_cast<int32_t>(number));
  }
}

}  // namespace ds::storage
