// Leases, and the copies of blocks that they need.
#include <string.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "storage/alignment.h"
#include "storage/flat_view.h"
#include "storage/side_stream.h"
#include "storage/storage_state.h"
#include "storage/waited.h"

namespace ds::storage {
namespace {

char* address(const at::Tensor& memory) { return static_cast<char*>(memory.data_ptr()); }

void copy(const at::Tensor& to, int64_t to_offset, const at::Tensor& from, int64_t from_offset, int64_t bytes,
          bool wait = true) {
  if (bytes == 0) return;
  if (to.device().is_cpu() && from.device().is_cpu()) {
    memcpy(address(to) + to_offset, address(from) + from_offset, static_cast<size_t>(bytes));
    return;
  }
  flat_view(to, to.storage_offset() + to_offset, at::kByte, bytes)
      .copy_(flat_view(from, from.storage_offset() + from_offset, at::kByte, bytes), /*non_blocking=*/!wait);
}

// A device that has failed says so to whoever works on it next; here nobody could be told.
FencePtr fence_after(const at::Tensor& memory) noexcept {
  try {
    return Fence::after(memory);
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

// ---- memory of copies ---------------------------------------------------------------------------------------------

StagingPtr StorageState::new_staging(const Plane& plane, int32_t first, int32_t end, Medium at) const {
  auto staging = std::make_shared<Staging>();
  staging->medium = at;
  staging->first = first;
  staging->end = end;
  staging->user = plane.user;
  staging->bytes = copy_bytes(plane.bytes(first, end));
  return staging;
}

void StorageState::allocate(Lock& lock, Staging& staging, bool may_wait) {
  staging.memory = take(lock, staging.medium, staging.bytes, &MediumUsage::staged, may_wait, staging.user);
  if (staging.memory.device().is_cpu()) staging.offset = aligned_offset(staging.memory);
}

void StorageState::drop(const StagingPtr& staging) {
  give(staging->medium, std::exchange(staging->memory, {}), staging->bytes, &MediumUsage::staged, staging->user);
}

void StorageState::drop_prefetched(Plane& plane, int32_t first, int32_t end) {
  auto& all = plane.prefetched;
  for (size_t i = 0; i < all.size();) {
    if (all[i]->fetching || all[i]->end <= first || all[i]->first >= end) {
      ++i;
      continue;
    }
    const StagingPtr staging = all[i];
    all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
    ++counts_.prefetch_drops;
    drop(staging);
  }
}

bool StorageState::drop_oldest_prefetched(Medium medium, int32_t user) {
  for (const PlanePtr& plane : planes_) {
    if (!plane) continue;
    const auto found = std::find_if(plane->prefetched.begin(), plane->prefetched.end(), [&](const StagingPtr& staging) {
      return !staging->fetching && staging->medium == medium && (user < 0 || staging->user == user);
    });
    if (found == plane->prefetched.end()) continue;
    const StagingPtr staging = *found;
    plane->prefetched.erase(found);
    ++counts_.prefetch_drops;
    account(medium).used.staged -= staging->bytes;  // not to the pool: the room is wanted
    count_user(medium, staging->user, -staging->bytes);
    return true;
  }
  return false;
}

// ---- transfers ----------------------------------------------------------------------------------------------------

void StorageState::transfer(const Plane& plane, const PlanePart& part, int32_t block, const Staging& staging,
                            bool fetch, bool in_background) {
  double seconds = 0;
  {
    const Waited timed(seconds);
    transfer_block(plane, part, block, staging, fetch, in_background);
  }
  const Lock lock(mutex_);
  MediumUsage& used = account(part.medium).used;
  (fetch ? used.read_bytes : used.written_bytes) += plane.bytes(block, block + 1);
  (fetch ? used.read_seconds : used.write_seconds) += seconds;
}

void StorageState::transfer_block(const Plane& plane, const PlanePart& part, int32_t block, const Staging& staging,
                                  bool fetch, bool in_background) {
  const int64_t bytes = plane.bytes(block, block + 1);
  const int64_t here = staging.offset + plane.bytes(staging.first, block);
  if (part.memory.defined()) {
    const int64_t there = plane.bytes(part.first, block);
    if (fetch) return copy(staging.memory, here, part.memory, there, bytes);
    return copy(part.memory, there, staging.memory, here, bytes);
  }
  const auto index = static_cast<size_t>(block - part.first);
  if (!staging.memory.device().is_cpu() && part.part->reaches_device()) {
    c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
    return fetch ? part.part->read_device(index, staging.memory, here)
                 : part.part->write_device(index, staging.memory, here);
  }
  const bool whole = (here - staging.offset) % kAlignment == 0 && (block + 1 == staging.end || bytes % kAlignment == 0);
  const bool direct = staging.memory.device().is_cpu() && (whole || part.part->any_address());
  if (direct) {
    char* data = address(staging.memory) + here;
    return fetch ? part.part->read(index, data) : part.part->write(index, data);
  }
  // Through host memory: what lies there in another order, or on a device.
  const StagingPtr bounce = new_staging(plane, block, block + 1, Medium::kHost);
  Lock lock(mutex_);
  allocate(lock, *bounce, /*may_wait=*/!in_background);
  lock.unlock();
  try {
    char* data = address(bounce->memory) + bounce->offset;
    if (fetch) {
      part.part->read(index, data);
      copy(staging.memory, here, bounce->memory, bounce->offset, bytes);
    } else {
      copy(bounce->memory, bounce->offset, staging.memory, here, bytes);
      part.part->write(index, data);
    }
  } catch (...) {
    lock.lock();
    drop(bounce);
    throw;
  }
  lock.lock();
  drop(bounce);
}

void StorageState::copy_plane(Plane& plane, std::vector<PlanePart>& to, bool wait_each) {
  for (const PlanePart& target : to) {
    for (int32_t b = target.first; b < target.end; ++b) {
      const PlanePart& source = plane.parts[plane.blocks[b].part];
      const int64_t there = plane.bytes(target.first, b);
      if (source.memory.defined() && target.memory.defined()) {
        copy(target.memory, there, source.memory, plane.bytes(source.first, b), plane.bytes(b, b + 1), wait_each);
        continue;
      }
      // From or to something that is read block by block: one block at a time through the host.
      const StagingPtr staging = new_staging(plane, b, b + 1, Medium::kHost);
      Lock lock(mutex_);
      allocate(lock, *staging, /*may_wait=*/true);
      lock.unlock();
      try {
        transfer(plane, source, b, *staging, /*fetch=*/true, /*in_background=*/false);
        transfer(plane, target, b, *staging, /*fetch=*/false, /*in_background=*/false);
      } catch (...) {
        lock.lock();
        drop(staging);
        throw;
      }
      lock.lock();
      drop(staging);
    }
  }
}

void StorageState::in_background(std::function<void()> job) noexcept {
  try {
    threads_.add(job);
  } catch (const std::exception&) {  // no thread to be had
    job();
  }
}

// ---- leases -------------------------------------------------------------------------------------------------------

Lease StorageState::acquire(int32_t number, plan::Range range, Access access, Medium at) {
  Lock lock(mutex_);
  const PlanePtr plane = plane_of(number);
  check_range(*plane, range, at);
  const auto [first, end] = plane->blocks_of(range);
  const bool alone = access != Access::kRead;
  wait_for_blocks(lock, *plane, first, end, alone);
  Lease lease;
  lease.plane_ = number;
  lease.first_ = first;
  lease.end_ = end;
  lease.access_ = access;
  mark(*plane, first, end, alone);
  try {
    for (int32_t b = first; b < end; ++b) {
      Block& block = plane->blocks[b];
      if (!block.error) continue;
      if (access != Access::kWrite || !plane->covers(range, b)) block.error->raise();
      block.error = nullptr;
    }
    if (const PlanePart* part = plane->resting(first, end, at)) {
      if (alone && !plane->prefetched.empty()) drop_prefetched(*plane, first, end);
      const int64_t offset = part->memory.storage_offset() + (range.begin - part->begin) * plane->element;
      lease.data_ = flat_view(part->memory, offset, plane->type, range.numel());
      wait_for_streams(*plane, first, end);
    } else {
      lease.staging_ = stage(lock, *plane, range, first, end, access, at);
      const Staging& staging = *lease.staging_;
      const int64_t skipped = first == end ? 0 : (range.begin - plane->blocks[first].begin) * plane->element;
      lease.data_ = flat_view(staging.memory, staging.offset + skipped, plane->type, range.numel());
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    unmark(*plane, first, end, alone, nullptr);
    throw;
  }
  ++counts_.leases;
  lease.state_ = shared_from_this();
  return lease;
}

StagingPtr StorageState::stage(Lock& lock, Plane& plane, plan::Range range, int32_t first, int32_t end, Access access,
                               Medium at) {
  for (;;) {
    const auto found = std::find_if(plane.prefetched.begin(), plane.prefetched.end(), [&](const StagingPtr& one) {
      return one->first == first && one->end == end && one->medium == at;
    });
    if (found == plane.prefetched.end()) break;
    if ((*found)->fetching) {
      const Waited timed(account(plane.parts[plane.blocks[first].part].medium).used.waited_seconds);
      wait(lock);
      continue;
    }
    StagingPtr staging = *found;
    plane.prefetched.erase(found);
    ++counts_.prefetch_hits;
    if (access != Access::kRead) drop_prefetched(plane, first, end);
    if (staging->ready) staging->ready->wait(staging->memory);
    return staging;
  }
  if (access != Access::kRead) drop_prefetched(plane, first, end);
  StagingPtr staging = new_staging(plane, first, end, at);
  double seconds = 0;
  const auto waited = [&] {
    if (first < end) account(plane.parts[plane.blocks[first].part].medium).used.waited_seconds += seconds;
  };
  {
    const Waited timed(seconds);
    allocate(lock, *staging, /*may_wait=*/true);
  }
  wait_for_streams(plane, first, end);
  lock.unlock();
  try {
    const Waited timed(seconds);
    for (int32_t b = first; b < end; ++b) {
      if (access == Access::kWrite && plane.covers(range, b)) continue;
      transfer(plane, plane.parts[plane.blocks[b].part], b, *staging, /*fetch=*/true, /*in_background=*/false);
    }
  } catch (...) {
    lock.lock();
    drop(staging);
    throw;
  }
  lock.lock();
  waited();
  return staging;
}

void StorageState::release(Lease& lease) noexcept {
  at::Tensor used = std::move(lease.data_);
  StagingPtr staging = std::move(lease.staging_);
  Lock lock(mutex_);
  --counts_.leases;
  if (lease.plane_ < 0) {
    used.reset();
    give(staging->medium, std::exchange(staging->memory, {}), staging->bytes, &MediumUsage::scratch, staging->user);
    return;
  }
  const bool alone = lease.access_ != Access::kRead;
  const PlanePtr plane = planes_[lease.plane_];  // it cannot be removed meanwhile
  if (staging && alone && lease.first_ != lease.end_) {
    const FencePtr fence = fence_after(staging->memory);
    used.reset();
    ++jobs_;
    ++counts_.write_backs;
    count_flight(*staging, 1);
    lock.unlock();
    in_background([this, plane, staging, fence] { write_back(plane, staging, fence); });
    return;
  }
  FencePtr fence;
  if (staging) {
    drop(staging);
  } else {
    fence = fence_after(used);
  }
  used.reset();  // before somebody else may have the memory, or free it
  unmark(*plane, lease.first_, lease.end_, alone, fence);
}

void StorageState::write_back(const PlanePtr& plane, const StagingPtr& staging, const FencePtr& fence) {
  const SideStream side(device_);
  std::vector<FailurePtr> errors(plane->blocks.size());
  {
    const Lock lock(mutex_);
    wait_for_streams(*plane, staging->first, staging->end);
  }
  FencePtr written;
  for (int32_t b = staging->first; b < staging->end; ++b) {
    try {
      if (fence) fence->wait(staging->memory);
      transfer(*plane, plane->parts[plane->blocks[b].part], b, *staging, /*fetch=*/false, /*in_background=*/true);
      const at::Tensor& home = plane->parts[plane->blocks[b].part].memory;
      if (home.defined() && !home.device().is_cpu()) written = Fence::after(home);
    } catch (...) {
      errors[b] = caught();
    }
  }
  const Lock lock(mutex_);
  for (int32_t b = staging->first; b < staging->end; ++b) {
    plane->blocks[b].error = errors[b];
    if (errors[b]) failures_.push_back(errors[b]);
  }
  count_flight(*staging, -1);
  drop(staging);
  --jobs_;
  unmark(*plane, staging->first, staging->end, /*alone=*/true, written);
}

}  // namespace ds::storage
