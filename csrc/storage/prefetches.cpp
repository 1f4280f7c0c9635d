#include "storage/prefetches.h"

#include <algorithm>
#include <utility>

#include "base/ranges.h"
#include "storage/side_stream.h"
#include "storage/waited.h"

namespace ds::storage {
namespace {

auto find_copy(const Plane& plane, int32_t first, int32_t end, Medium at) {
  return find_if(plane.prefetched, [&](const StagingPtr& copy) {
    return copy->first == first && copy->end == end && copy->medium == at;
  });
}

}  // namespace

void Prefetches::prefetch(int32_t number, plan::Range range, Medium at) {
  auto lock = lock_.hold();
  const PlanePtr plane = planes_.find(number, range, at);
  const auto [first, end] = plane->blocks_of(range);
  if (first == end || plane->resting(first, end, at)) return;
  for (int32_t b = first; b < end; ++b)
    if (plane->absent(b)) return;
  if (find_copy(*plane, first, end, at) != plane->prefetched.end()) return;
  ++memory_.events().prefetches;
  const auto unusable = [](const Block& block) { return block.writer || block.error; };
  const StagingPtr copy = plane->new_copy(first, end, at);
  if (std::any_of(plane->blocks.begin() + first, plane->blocks.begin() + end, unusable) ||
      !memory_.reserve_prefetch(lock, *copy)) {
    ++memory_.events().prefetch_drops;
    return;
  }
  copy->fetching = true;
  planes_.mark(*plane, first, end, /*alone=*/false);
  plane->prefetched.push_back(copy);
  background_.begin();
  memory_.count_flight(*copy, 1);
  lock.unlock();
  background_.run([this, plane, copy] { fetch(plane, copy); });
}

void Prefetches::fetch(const PlanePtr& plane, const StagingPtr& copy) {
  const SideStream side(memory_.device_of(Medium::kDevice));
  bool fetched = false;
  try {
    auto lock = lock_.hold();
    memory_.take_reserved(lock, *copy);
    planes_.wait_for_streams(*plane, copy->first, copy->end);
    lock.unlock();
    for (int32_t b = copy->first; b < copy->end; ++b) copies_.fetch(*plane, b, *copy, /*in_background=*/true);
    copy->ready = Fence::after(copy->memory);
    fetched = true;
  } catch (...) {
    // A prefetch is only a hint: acquire() fetches the range again, and reports the error.
  }
  const auto lock = lock_.hold();
  copy->fetching = false;
  memory_.count_flight(*copy, -1);
  background_.end();
  if (!fetched) {
    plane->prefetched.erase(std::find(plane->prefetched.begin(), plane->prefetched.end(), copy));
    ++memory_.events().prefetch_drops;
    memory_.give(*copy);
  }
  planes_.add_fence(*plane, copy->first, copy->end);
  planes_.unmark(*plane, copy->first, copy->end, /*alone=*/false);
}

bool Prefetches::here(int32_t number, plan::Range range, Medium at) {
  const auto lock = lock_.hold();
  const PlanePtr plane = planes_.find(number);
  const auto [first, end] = plane->blocks_of(range);
  const auto written = [](const Block& block) { return block.writer; };
  if (std::any_of(plane->blocks.begin() + first, plane->blocks.begin() + end, written)) return false;
  if (first == end || plane->resting(first, end, at)) return true;
  const auto found = find_copy(*plane, first, end, at);
  return found != plane->prefetched.end() && !(*found)->fetching;
}

StagingPtr Prefetches::take(StorageLock::Held& lock, Plane& plane, int32_t first, int32_t end, Medium at) {
  for (;;) {
    const auto found = find_copy(plane, first, end, at);
    if (found == plane.prefetched.end()) return nullptr;
    if (!(*found)->fetching) {
      StagingPtr copy = *found;
      plane.prefetched.erase(found);
      ++memory_.events().prefetch_hits;
      return copy;
    }
    const Waited timed(memory_.used(plane.part_of(first).medium).waited_seconds, &memory_.clock());
    lock_.wait(lock);
  }
}

void Prefetches::drop(Plane& plane, int32_t first, int32_t end) {
  auto& all = plane.prefetched;
  for (size_t i = 0; i < all.size();) {
    if (all[i]->fetching || all[i]->end <= first || all[i]->first >= end) {
      ++i;
      continue;
    }
    const StagingPtr copy = all[i];
    all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
    ++memory_.events().prefetch_drops;
    memory_.give(*copy);
  }
}

}  // namespace ds::storage
