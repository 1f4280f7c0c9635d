#include "storage/leases.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/sizes.h"
#include "storage/flat_view.h"
#include "storage/side_stream.h"
#include "storage/waited.h"

namespace ds::storage {

Lease Leases::acquire(int32_t number, plan::Range range, Access access, Medium at) {
  auto lock = lock_.hold();
  PlanePtr plane = planes_.find(number, range, at);
  const auto [first, end] = plane->blocks_of(range);
  const bool alone = access != Access::kRead;
  planes_.wait_for_blocks(lock, *plane, first, end, alone);
  Lease lease;
  lease.first_ = first;
  lease.end_ = end;
  lease.access_ = access;
  planes_.mark(*plane, first, end, alone);
  try {
    for (int32_t b = first; b < end; ++b) {
      Block& block = plane->blocks[b];
      if (!block.error) continue;
      if (access != Access::kWrite || !plane->covers(range, b)) block.error->raise();
      block.error = nullptr;
    }
    const bool in_pieces = plane->apart && end - first > 1 && plane->in_memory(first, end, at);
    const bool fills = access == Access::kWrite && first + 1 == end && plane->covers(range, first);
    if (!in_pieces) planes_.open_absent(lock, *plane, first, end, /*zero=*/!fills);
    if (in_pieces) {
      if (alone && !plane->prefetched.empty()) prefetches_.drop(*plane, first, end);
      for (int32_t b = first; b < end; ++b) {
        if (plane->absent(b)) continue;
        const PlanePart& part = plane->part_of(b);
        const int64_t from = std::max(range.begin, part.begin), to = std::min(range.end, plane->blocks[b].end);
        const int64_t offset = part.memory.storage_offset() + (from - part.begin) * plane->element;
        lease.pieces_.push_back({from - range.begin, flat_view(part.memory, offset, plane->type, to - from)});
      }
      planes_.wait_for_streams(*plane, first, end);
    } else if (const PlanePart* part = plane->resting(first, end, at)) {
      if (alone && !plane->prefetched.empty()) prefetches_.drop(*plane, first, end);
      const int64_t offset = part->memory.storage_offset() + (range.begin - part->begin) * plane->element;
      lease.data_ = flat_view(part->memory, offset, plane->type, range.numel());
      planes_.wait_for_streams(*plane, first, end);
    } else {
      lease.staging_ = copy_of(lock, *plane, range, lease, at);
      const Staging& copy = *lease.staging_;
      const int64_t skipped = first == end ? 0 : (range.begin - plane->blocks[first].begin) * plane->element;
      lease.data_ = flat_view(copy.memory, copy.offset + skipped, plane->type, range.numel());
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    planes_.unmark(*plane, first, end, alone);
    throw;
  }
  ++memory_.events().leases;
  lease.plane_ = std::move(plane);
  return lease;
}

Lease Leases::scratch(int64_t numel, at::ScalarType type, Medium at, int32_t user) {
  if (numel < 0) fail(ErrorKind::kValue, "scratch of ", numel, " elements");
  auto lock = lock_.hold();
  Lease lease;
  lease.staging_ = std::make_shared<Staging>();
  Staging& staging = *lease.staging_;
  staging.medium = at;
  staging.bytes = sizes::product("bytes of scratch", numel, static_cast<int64_t>(c10::elementSize(type)));
  staging.user = user;
  staging.kind = &MediumUsage::scratch;
  memory_.take(lock, staging, /*may_wait=*/true);
  ++memory_.events().leases;
  lease.data_ = flat_view(staging.memory, 0, type, numel);
  return lease;
}

StagingPtr Leases::copy_of(StorageLock::Held& lock, Plane& plane, plan::Range range, const Lease& lease, Medium at) {
  const int32_t first = lease.first_, end = lease.end_;
  const bool alone = lease.access_ != Access::kRead;
  StagingPtr copy = prefetches_.take(lock, plane, first, end, at);
  if (alone) prefetches_.drop(plane, first, end);
  if (copy) {
    if (const FencePtr ready = std::exchange(copy->ready, nullptr)) ready->wait(copy->memory);
    return copy;
  }
  copy = plane.new_copy(first, end, at);
  double seconds = 0;
  {
    const Waited timed(seconds, &memory_.clock());
    memory_.take(lock, *copy, /*may_wait=*/true);
  }
  planes_.wait_for_streams(plane, first, end);
  lock.unlock();
  try {
    const Waited timed(seconds, &memory_.clock());
    for (int32_t b = first; b < end; ++b) {
      if (lease.access_ == Access::kWrite && plane.covers(range, b)) continue;
      copies_.fetch(plane, b, *copy, /*in_background=*/false);
    }
  } catch (...) {
    lock.lock();
    planes_.add_fence(plane, first, end);
    memory_.give(*copy);
    throw;
  }
  lock.lock();
  planes_.add_fence(plane, first, end);
  if (first < end) memory_.used(plane.part_of(first).medium).waited_seconds += seconds;
  return copy;
}

void Leases::release(Lease& lease) noexcept {
  at::Tensor used = std::move(lease.data_);
  lease.pieces_.clear();
  const StagingPtr copy = std::move(lease.staging_);
  auto lock = lock_.hold();
  --memory_.events().leases;
  const PlanePtr plane = std::move(lease.plane_);
  if (!plane) {
    used.reset();
    memory_.give(*copy);
    return;
  }
  const bool alone = lease.access_ != Access::kRead;
  if (copy && alone && lease.first_ != lease.end_) {
    const FencePtr fence = fence_after(copy->memory);
    used.reset();
    background_.begin();
    ++memory_.events().write_backs;
    memory_.count_flight(*copy, 1);
    lock.unlock();
    background_.run([this, plane, copy, fence] { write_back(plane, copy, fence); });
    return;
  }
  if (copy) {
    memory_.give(*copy);
  } else {
    planes_.add_fence(*plane, lease.first_, lease.end_);
  }
  used.reset();  // before somebody else may have the memory, or free it
  planes_.unmark(*plane, lease.first_, lease.end_, alone);
}

void Leases::write_back(const PlanePtr& plane, const StagingPtr& copy, const FencePtr& fence) {
  const SideStream side(memory_.device_of(Medium::kDevice));
  std::vector<FailurePtr> errors(plane->blocks.size());
  {
    const auto lock = lock_.hold();
    planes_.wait_for_streams(*plane, copy->first, copy->end);
  }
  for (int32_t b = copy->first; b < copy->end; ++b) {
    try {
      if (fence) fence->wait(copy->memory);
      copies_.write_back(*plane, b, *copy);
    } catch (...) {
      errors[b] = caught();
    }
  }
  const auto lock = lock_.hold();
  for (int32_t b = copy->first; b < copy->end; ++b) {
    plane->blocks[b].error = errors[b];
    if (errors[b]) background_.failed(errors[b]);
  }
  memory_.count_flight(*copy, -1);
  memory_.give(*copy);
  background_.end();
  planes_.add_fence(*plane, copy->first, copy->end);
  planes_.unmark(*plane, copy->first, copy->end, /*alone=*/true);
}

}  // namespace ds::storage
