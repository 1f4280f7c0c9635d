#include "storage/storage_state.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/sizes.h"
#include "storage/flat_view.h"
#include "storage/waited.h"

namespace ds::storage {

StorageState::StorageState(c10::Device device, Budget budget, const FileAccess& files)
    : device_(device),
      idle_scratch_(budget.idle_scratch),
      tiers_(make_tiers({device, files})),
      threads_(budget.transfer_threads) {
  if (budget.transfer_threads < 1 || budget.transfer_threads > 64) {
    fail(ErrorKind::kValue, "the number of transfer threads must be from 1 to 64, got ", budget.transfer_threads);
  }
  for (size_t i = 0; i < tiers_.size(); ++i) {
    const auto medium = static_cast<Medium>(i);
    const auto limit = budget.bytes.find(medium);
    accounts_.emplace_back(limit == budget.bytes.end() ? INT64_MAX : limit->second, budget.idle_scratch);
    accounts_.back().used.name = name_of(medium);
    if (accounts_.back().limit < 0) {
      fail(ErrorKind::kValue, "a budget is at least 0 bytes, got ", limit->second, " for ", name_of(medium));
    }
  }
}

PlanePtr StorageState::plane_of(int32_t number) const {
  if (number < 0 || number >= static_cast<int32_t>(planes_.size()) || !planes_[number]) {
    fail(ErrorKind::kIndex, "there is no plane ", number, " (any more)");
  }
  return planes_[number];
}

StorageState::Account& StorageState::account(Medium medium) {
  if (static_cast<size_t>(medium) >= accounts_.size()) {
    fail(ErrorKind::kValue, "there is no ", name_of(medium));
  }
  return accounts_[static_cast<size_t>(medium)];
}

void StorageState::check_range(const Plane& plane, plan::Range range, Medium at) {
  account(at);
  if (range.begin < 0 || range.end < range.begin || range.end > plane.numel) {
    fail(ErrorKind::kIndex, "plane '", plane.name, "' has ", plane.numel, " elements; [", range.begin, ", ", range.end,
         ") is not among them");
  }
}

// ---- exclusion ----------------------------------------------------------------------------------------------------

void StorageState::wait(Lock& lock) {
  ++waiting_;
  changed_.wait(lock);
  --waiting_;
}

void StorageState::changed() {
  if (waiting_ > 0) changed_.notify_all();
}

void StorageState::wait_for_blocks(Lock& lock, const Plane& plane, int32_t first, int32_t end, bool alone) {
  const auto busy = [&](const Block& block) { return block.writer || (alone && block.readers > 0); };
  const auto somebody = [&] { return std::any_of(plane.blocks.begin() + first, plane.blocks.begin() + end, busy); };
  if (!plane.removed && somebody()) {
    const Waited waited(account(plane.parts[plane.blocks[first].part].medium).used.waited_seconds);
    while (!plane.removed && somebody()) wait(lock);
  }
  if (plane.removed) fail(ErrorKind::kIndex, "plane '", plane.name, "' has been removed");
}

void StorageState::mark(Plane& plane, int32_t first, int32_t end, bool alone) {
  for (int32_t b = first; b < end; ++b) {
    if (alone) {
      plane.blocks[b].writer = true;
    } else {
      ++plane.blocks[b].readers;
    }
  }
}

void StorageState::unmark(Plane& plane, int32_t first, int32_t end, bool alone, const FencePtr& fence) {
  for (int32_t b = first; b < end; ++b) {
    Block& block = plane.blocks[b];
    if (alone) {
      block.writer = false;
    } else {
      --block.readers;
    }
    block.fences.add(fence);
  }
  changed();
}

void StorageState::wait_for_streams(const Plane& plane, int32_t first, int32_t end) const {
  if (device_.is_cpu()) return;
  for (int32_t b = first; b < end; ++b) {
    const at::Tensor& memory = plane.parts[plane.blocks[b].part].memory;
    if (memory.defined() && !memory.device().is_cpu()) plane.blocks[b].fences.wait(memory);
  }
}

// ---- memory -------------------------------------------------------------------------------------------------------

void StorageState::Account::free_idle(int64_t bytes) {
  for (User& user : users) {
    if (bytes <= 0) return;
    const int64_t before = user.pool.idle_bytes();
    user.pool.trim(std::max<int64_t>(0, before - bytes));
    bytes -= before - user.pool.idle_bytes();
  }
}

bool StorageState::make_room(Account& account, int64_t bytes) {
  const auto medium = static_cast<Medium>(&account - accounts_.data());
  const auto excess = [&] {
    return bytes > account.limit ? account.total() : account.total() - (account.limit - bytes);
  };
  while (excess() > 0) {
    if (account.idle() > 0) {
      account.free_idle(excess());
    } else if (!drop_oldest_prefetched(medium)) {
      return false;
    }
  }
  return bytes <= account.limit;
}

void StorageState::reserve(Lock& lock, Medium medium, int64_t bytes, int64_t MediumUsage::*kind, bool may_wait) {
  Account& account = this->account(medium);
  bool waited = false;
  while (!make_room(account, bytes)) {
    if (!may_wait || account.in_flight == 0) {
      if (bytes > 0) ++account.used.over_budget;
      break;
    }
    counts_.budget_waits += !std::exchange(waited, true);
    wait(lock);
  }
  account.used.*kind += bytes;
  account.used.peak = std::max(account.used.peak, account.total());
  account.used.peak_scratch = std::max(account.used.peak_scratch, account.used.scratch + account.idle());
}

at::Tensor StorageState::take(Lock& lock, Medium medium, int64_t bytes, int64_t MediumUsage::*kind, bool may_wait,
                              int32_t user) {
  Account& account = this->account(medium);
  ScratchPool& pool = account.users.at(user).pool;
  if (account.users[user].keeps) pool.keep_two_of(bytes);
  at::Tensor memory = pool.take(bytes, device_of(medium));
  if (memory.defined()) {
    account.used.*kind += bytes;
    count_user(medium, user, bytes);
    return memory;
  }
  make_room_of_user(lock, medium, bytes, may_wait, user);
  count_user(medium, user, bytes);
  try {
    reserve(lock, medium, bytes, kind, may_wait);
    return fresh(lock, medium, bytes);
  } catch (...) {
    account.used.*kind -= bytes;
    count_user(medium, user, -bytes);
    changed();
    throw;
  }
}

at::Tensor StorageState::fresh(Lock& lock, Medium medium, int64_t bytes) {
  lock.unlock();
  at::Tensor memory;
  try {
    memory = tiers_[static_cast<size_t>(medium)]->allocate(bytes);
    if (!memory.defined()) {
      fail(ErrorKind::kValue, "nobody can work in the tier '", name_of(medium), "': acquire leases elsewhere");
    }
  } catch (...) {
    lock.lock();
    throw;
  }
  lock.lock();
  return memory;
}

void StorageState::give(Medium medium, at::Tensor memory, int64_t bytes, int64_t MediumUsage::*kind, int32_t user) {
  Account& account = this->account(medium);
  account.used.*kind -= bytes;
  count_user(medium, user, -bytes);
  if (memory.defined() && bytes > 0 && account.users[user].keeps) {
    account.users[user].pool.give(memory);
    account.free_idle(account.total() - account.limit);
  }
  changed();
}

// ---- planes -------------------------------------------------------------------------------------------------------

void StorageState::open_parts(Lock& lock, Plane& plane, const Placement& placement, std::vector<PlanePart>& parts) {
  for (PlanePart& part : plan_parts(plane, placement)) {
    PartSpec spec{plane.name, {}, placement, {}, plane.folder};
    for (int32_t b = part.first; b < part.end; ++b) {
      spec.block_bytes.push_back(plane.bytes(b, b + 1));
      if (!plane.block_files.empty()) spec.block_files.push_back(plane.block_files[b]);
    }
    reserve(lock, part.medium, part.bytes, &MediumUsage::resting, /*may_wait=*/true);
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
      account(part.medium).used.resting -= part.bytes;
      throw;
    }
    lock.lock();
    part.memory = part.part->memory();
    parts.push_back(std::move(part));
  }
}

void StorageState::close_parts(Plane& plane, std::vector<PlanePart>& parts) {
  for (PlanePart& part : parts) {
    account(part.medium).used.resting -= part.bytes;
    const at::Tensor* lasting = plane.lasting_of(part);
    if (lasting != nullptr && part.memory.defined() && part.memory.is_alias_of(*lasting) && !plane.removed) {
      part.memory.reset();
      empty_memory(*lasting);
    }
  }
  parts.clear();
}

int32_t StorageState::add(std::string name, int64_t numel, at::ScalarType type, const Placement& placement,
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
  account(placement.work);
  plane->block_files = extras.block_files;
  plane->folder = extras.folder;
  plane->user = extras.copies.number;
  if (!plane->block_files.empty() && plane->block_files.size() != plane->blocks.size()) {
    fail(ErrorKind::kValue, "plane '", plane->name, "' has ", plane->blocks.size(), " blocks, and names of ",
         plane->block_files.size(), " files");
  }
  Lock lock(mutex_);
  if (memory.defined()) {
    const bool memory_rests = placement.rest == placement.work && placement.rest <= Medium::kHost &&
                              memory.device() == device_of(placement.rest);
    if (memory.numel() != numel || memory.scalar_type() != type || !memory.is_contiguous() || !memory_rests) {
      fail(ErrorKind::kValue, "plane '", plane->name, "' brings memory along: ", numel, " contiguous elements of ",
           c10::toString(type), " that rest on the device or on the host, whole");
    }
    std::vector<PlanePart> parts = plan_parts(*plane, placement);
    reserve(lock, placement.rest, parts[0].bytes, &MediumUsage::resting, /*may_wait=*/true);
    const int64_t offset = memory.storage_offset() * plane->element;
    parts[0].memory = flat_view(memory, offset, at::kByte, parts[0].bytes);
    parts[0].part = std::make_unique<MemoryPart>(parts[0].memory);
    plane->parts = std::move(parts);
    plane->lasting.push_back({placement.rest, 0, static_cast<int32_t>(plane->blocks.size()), memory});
  } else {
    try {
      open_parts(lock, *plane, placement, plane->parts);
    } catch (...) {
      close_parts(*plane, plane->parts);
      throw;
    }
  }
  for (size_t p = 0; p < plane->parts.size(); ++p) {
    for (int32_t b = plane->parts[p].first; b < plane->parts[p].end; ++b)
      plane->blocks[b].part = static_cast<int32_t>(p);
  }
  planes_.push_back(std::move(plane));
  return static_cast<int32_t>(planes_.size()) - 1;
}

void StorageState::lock_planes(Lock& lock, const std::vector<PlanePtr>& planes) {
  for (const PlanePtr& plane : planes) {
    const auto count = static_cast<int32_t>(plane->blocks.size());
    wait_for_blocks(lock, *plane, 0, count, /*alone=*/true);
    mark(*plane, 0, count, /*alone=*/true);
    drop_prefetched(*plane, 0, count);
  }
}

void StorageState::remove(int32_t number) {
  Lock lock(mutex_);
  const PlanePtr plane = plane_of(number);
  lock_planes(lock, {plane});
  plane->removed = true;
  close_parts(*plane, plane->parts);
  plane->lasting.clear();
  plane->folder.reset();
  planes_[number].reset();
  changed();
}

std::optional<Medium> StorageState::resting(int32_t number, plan::Range range) const {
  const Lock lock(mutex_);
  const PlanePtr plane = plane_of(number);
  const auto [first, end] = plane->blocks_of(range);
  const PlanePart& part = plane->parts[plane->blocks[first].part];
  const bool whole = part.memory.defined() && end <= part.end;
  return whole ? std::optional<Medium>(part.medium) : std::nullopt;
}

plan::Range StorageState::all_of(int32_t number) const {
  const Lock lock(mutex_);
  return {0, plane_of(number)->numel};
}

Placement StorageState::placement(int32_t number) const {
  const Lock lock(mutex_);
  return plane_of(number)->placement;
}

// ---- what has happened --------------------------------------------------------------------------------------------

void StorageState::settle() {
  Lock lock(mutex_);
  while (jobs_ > 0) wait(lock);
  const auto failures = std::exchange(failures_, {});
  if (failures.empty()) return;
  std::string others;
  if (failures.size() > 1) {
    others = " " + std::to_string(failures.size() - 1) + " more blocks could not be written back:";
    for (size_t i = 1; i < std::min<size_t>(failures.size(), 4); ++i) others += "\n" + failures[i]->text;
    if (failures.size() > 4) others += "\n...";
  }
  failures[0]->raise(others);
}

// Leases may outlive the storage: one of scratch must not keep the memory of planes that nobody uses.
void StorageState::close() {
  const Lock lock(mutex_);
  for (PlanePtr& plane : planes_) {
    const auto busy = [](const Block& block) { return block.writer || block.readers > 0; };
    if (!plane || std::any_of(plane->blocks.begin(), plane->blocks.end(), busy)) continue;
    plane->removed = true;
    drop_prefetched(*plane, 0, static_cast<int32_t>(plane->blocks.size()));
    close_parts(*plane, plane->parts);
    plane->lasting.clear();
    plane->folder.reset();
    plane.reset();
  }
}

void StorageState::at_exit() noexcept {
  for (const auto& tier : tiers_) tier->at_exit();
}

void StorageState::limit(Medium medium, int64_t bytes) {
  const Lock lock(mutex_);
  account(medium).limit = std::max<int64_t>(0, bytes);
  changed();
}

Usage StorageState::usage() const {
  const Lock lock(mutex_);
  Usage usage = counts_;
  for (const Account& account : accounts_) {
    usage.media.push_back(account.used);
    usage.media.back().idle = account.idle();
  }
  for (const auto& tier : tiers_) tier->report(usage);
  return usage;
}

}  // namespace ds::storage
