// Blocks that are fetched before somebody asks, and blocks that nobody will ask for.
#include <algorithm>
#include <utility>

#include "storage/alignment.h"
#include "storage/side_stream.h"
#include "storage/storage_state.h"

namespace ds::storage {

void StorageState::prefetch(int32_t number, plan::Range range, Medium at) {
  Lock lock(mutex_);
  const PlanePtr plane = plane_of(number);
  check_range(*plane, range, at);
  const auto [first, end] = plane->blocks_of(range);
  if (first == end || plane->resting(first, end, at)) return;
  StagingPtr staging = new_staging(*plane, first, end, at);
  for (const StagingPtr& other : plane->prefetched) {
    if (other->first == staging->first && other->end == staging->end && other->medium == at) return;
  }
  ++counts_.prefetches;
  const auto unusable = [](const Block& block) { return block.writer || block.error; };
  Account& account = this->account(at);
  const bool waits = std::any_of(plane->blocks.begin() + first, plane->blocks.begin() + end, unusable);
  // No room is made by dropping what was prefetched before: that is wanted sooner.
  const int64_t excess = account.total() - account.idle() - (account.limit - staging->bytes);
  const Account::User& own = account.users[staging->user];
  if (waits || staging->bytes > account.limit || excess > 0 || own.usage.lent > own.limit - staging->bytes) {
    ++counts_.prefetch_drops;
    return;
  }
  make_room_of_user(lock, at, staging->bytes, /*may_wait=*/false, staging->user);  // idle scratch goes for it
  reserve(lock, at, staging->bytes, &MediumUsage::staged, /*may_wait=*/false);
  count_user(at, staging->user, staging->bytes);
  staging->fetching = true;
  mark(*plane, first, end, /*alone=*/false);
  plane->prefetched.push_back(staging);
  ++jobs_;
  count_flight(*staging, 1);
  lock.unlock();
  in_background([this, plane, staging] { fetch_in_background(plane, staging); });
}

void StorageState::discard(int32_t number, plan::Range range) {
  Lock lock(mutex_);
  const PlanePtr plane = plane_of(number);
  check_range(*plane, range, Medium::kHost);
  const auto [first, end] = plane->blocks_of(range);
  wait_for_blocks(lock, *plane, first, end, /*alone=*/true);
  drop_prefetched(*plane, first, end);
  for (int32_t b = first; b < end; ++b) {
    if (!plane->covers(range, b)) continue;
    const PlanePart& part = plane->parts[plane->blocks[b].part];
    part.part->discard(static_cast<size_t>(b - part.first));
  }
}

bool StorageState::here(int32_t number, plan::Range range, Medium at) const {
  const Lock lock(mutex_);
  const PlanePtr plane = plane_of(number);
  const auto [first, end] = plane->blocks_of(range);
  const auto written = [](const Block& block) { return block.writer; };
  if (std::any_of(plane->blocks.begin() + first, plane->blocks.begin() + end, written)) return false;
  if (first == end || plane->resting(first, end, at)) return true;
  const auto fetched = [&, first = first, end = end](const StagingPtr& one) {
    return !one->fetching && one->first == first && one->end == end && one->medium == at;
  };
  return std::any_of(plane->prefetched.begin(), plane->prefetched.end(), fetched);
}

void StorageState::fetch_in_background(const PlanePtr& plane, const StagingPtr& staging) {
  const SideStream side(device_);
  bool fetched = false;
  try {
    Lock lock(mutex_);
    staging->memory =
        account(staging->medium).users[staging->user].pool.take(staging->bytes, device_of(staging->medium));
    if (!staging->memory.defined()) staging->memory = fresh(lock, staging->medium, staging->bytes);
    if (staging->memory.device().is_cpu()) staging->offset = aligned_offset(staging->memory);
    wait_for_streams(*plane, staging->first, staging->end);
    lock.unlock();
    for (int32_t b = staging->first; b < staging->end; ++b) {
      transfer(*plane, plane->parts[plane->blocks[b].part], b, *staging, /*fetch=*/true, /*in_background=*/true);
    }
    staging->ready = Fence::after(staging->memory);
    fetched = true;
  } catch (...) {
    // Only a hint: whoever acquires the range fetches it, and is told.
  }
  const Lock lock(mutex_);
  staging->fetching = false;
  count_flight(*staging, -1);
  --jobs_;
  if (!fetched) {
    auto& all = plane->prefetched;
    all.erase(std::find(all.begin(), all.end(), staging));
    ++counts_.prefetch_drops;
    drop(staging);
  }
  unmark(*plane, staging->first, staging->end, /*alone=*/false, staging->ready);
}

}  // namespace ds::storage
