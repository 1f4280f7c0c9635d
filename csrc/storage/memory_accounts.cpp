#include "storage/memory_accounts.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "storage/alignment.h"
#include "storage/flat_view.h"

namespace ds::storage {
namespace {

void set_memory(Staging& staging, at::Tensor memory) {
  staging.memory = std::move(memory);
  const bool aligned = staging.kind == &MediumUsage::staged && staging.memory.device().is_cpu();
  staging.offset = aligned ? aligned_offset(staging.memory) : 0;
}

}  // namespace

MemoryAccounts::MemoryAccounts(StorageLock& lock, const Tiers& tiers, c10::Device device, const Budget& budget,
                               OldestPrefetched oldest_prefetched)
    : lock_(lock),
      tiers_(tiers),
      device_(device),
      idle_scratch_(budget.idle_scratch),
      oldest_prefetched_(std::move(oldest_prefetched)) {
  for (size_t i = 0; i < tiers.size(); ++i) {
    const auto medium = static_cast<Medium>(i);
    const auto limit = budget.bytes.find(medium);
    accounts_.emplace_back(limit == budget.bytes.end() ? INT64_MAX : limit->second, budget.idle_scratch);
    accounts_.back().used.name = name_of(medium);
    if (accounts_.back().limit < 0) {
      fail(ErrorKind::kValue, "a budget is at least 0 bytes, got ", limit->second, " for ", name_of(medium));
    }
  }
}

MemoryAccounts::Account& MemoryAccounts::account(Medium medium) {
  if (static_cast<size_t>(medium) >= accounts_.size()) {
    fail(ErrorKind::kValue, "there is no ", name_of(medium));
  }
  return accounts_[static_cast<size_t>(medium)];
}

// ---- room ---------------------------------------------------------------------------------------------------------

int64_t MemoryAccounts::Account::idle() const {
  int64_t bytes = 0;
  for (const User& user : users) bytes += user.pool.idle_bytes();
  return bytes;
}

void MemoryAccounts::Account::free_idle(int64_t bytes) {
  for (User& user : users) {
    if (bytes <= 0) return;
    const int64_t before = user.pool.idle_bytes();
    user.pool.trim(std::max<int64_t>(0, before - bytes));
    bytes -= before - user.pool.idle_bytes();
  }
}

void MemoryAccounts::count(const Staging& staging, int64_t bytes) {
  User& user = user_of(staging);
  user.usage.lent += bytes;
  user.usage.peak = std::max(user.usage.peak, user.usage.lent + user.pool.idle_bytes());
}

void MemoryAccounts::count_flight(const Staging& staging, int change) {
  account(staging.medium).in_flight += change;
  user_of(staging).in_flight += change;
}

bool MemoryAccounts::drop_oldest_prefetched(Medium medium, int32_t user) {
  const StagingPtr staging = oldest_prefetched_(medium, user);
  if (!staging) return false;
  ++events_.prefetch_drops;
  used(medium).staged -= staging->bytes;  // not to the pool: the room is wanted
  count(*staging, -staging->bytes);
  return true;
}

bool MemoryAccounts::make_room(Medium medium, int64_t bytes) {
  Account& account = this->account(medium);
  const auto excess = [&] {
    return bytes > account.limit ? account.total() : account.total() - (account.limit - bytes);
  };
  while (excess() > 0) {
    if (account.idle() > 0) {
      account.free_idle(excess());
    } else if (!drop_oldest_prefetched(medium, -1)) {
      return false;
    }
  }
  return bytes <= account.limit;
}

void MemoryAccounts::make_room_of_user(StorageLock::Held& lock, const Staging& staging, bool may_wait) {
  for (bool waited = false;;) {
    User& own = user_of(staging);
    const int64_t idle = own.pool.idle_bytes(), excess = own.usage.lent + idle - (own.limit - staging.bytes);
    if (excess <= 0) return;
    if (idle > 0) {
      own.pool.trim(std::max<int64_t>(0, idle - excess));
    } else if (!drop_oldest_prefetched(staging.medium, staging.user)) {
      if (!may_wait || own.in_flight == 0) {
        used(staging.medium).over_budget += staging.bytes > 0;
        return;
      }
      events_.budget_waits += !std::exchange(waited, true);
      lock_.wait(lock);
    }
  }
}

void MemoryAccounts::reserve(StorageLock::Held& lock, Medium medium, int64_t bytes, int64_t MediumUsage::*kind,
                             bool may_wait) {
  Account& account = this->account(medium);
  bool waited = false;
  while (!make_room(medium, bytes)) {
    if (!may_wait || account.in_flight == 0) {
      if (bytes > 0) ++account.used.over_budget;
      break;
    }
    events_.budget_waits += !std::exchange(waited, true);
    lock_.wait(lock);
  }
  account.used.*kind += bytes;
  account.used.peak = std::max(account.used.peak, account.total());
  account.used.peak_scratch = std::max(account.used.peak_scratch, account.used.scratch + account.idle());
}

// ---- memory of copies and scratch ---------------------------------------------------------------------------------

void MemoryAccounts::take(StorageLock::Held& lock, Staging& staging, bool may_wait) {
  MediumUsage& used = this->used(staging.medium);
  User& user = user_of(staging);
  user.pool.keep_two_of(staging.bytes);
  at::Tensor idle = user.pool.take(staging.bytes, device_of(staging.medium));
  if (idle.defined()) return use_idle(staging, std::move(idle), 0);
  make_room_of_user(lock, staging, may_wait);
  count(staging, staging.bytes);
  try {
    reserve(lock, staging.medium, staging.bytes, staging.kind, may_wait);
    fresh(lock, staging);
  } catch (...) {
    used.*staging.kind -= staging.bytes;
    count(staging, -staging.bytes);
    lock_.changed();
    throw;
  }
}

// All of the memory counts, which may be more than was asked for. `counted` bytes of it do so already.
void MemoryAccounts::use_idle(Staging& staging, at::Tensor memory, int64_t counted) {
  staging.bytes = bytes_of(memory);
  used(staging.medium).*staging.kind += staging.bytes - counted;
  count(staging, staging.bytes - counted);
  set_memory(staging, std::move(memory));
}

void MemoryAccounts::fresh(StorageLock::Held& lock, Staging& staging) {
  lock.unlock();
  try {
    at::Tensor memory = tiers_[static_cast<size_t>(staging.medium)]->allocate(staging.bytes);
    if (!memory.defined()) {
      fail(ErrorKind::kValue, "nobody can work in the tier '", name_of(staging.medium), "': acquire leases elsewhere");
    }
    set_memory(staging, std::move(memory));
  } catch (...) {
    lock.lock();
    throw;
  }
  lock.lock();
}

void MemoryAccounts::give(Staging& staging) {
  Account& account = this->account(staging.medium);
  const at::Tensor memory = std::exchange(staging.memory, {});
  account.used.*staging.kind -= staging.bytes;
  count(staging, -staging.bytes);
  User& user = user_of(staging);
  if (memory.defined() && staging.bytes > 0) {
    user.pool.give(memory, staging.ready);
    account.free_idle(account.total() - account.limit);
  }
  lock_.changed();
}

bool MemoryAccounts::reserve_prefetch(StorageLock::Held& lock, const Staging& staging) {
  const Account& account = this->account(staging.medium);
  const ScratchUsage& lent = user_of(staging).usage;
  const int64_t excess = account.used.total() - (account.limit - staging.bytes);
  if (staging.bytes > account.limit || excess > 0 || lent.lent > user_of(staging).limit - staging.bytes) return false;
  make_room_of_user(lock, staging, /*may_wait=*/false);  // idle scratch goes for it
  reserve(lock, staging.medium, staging.bytes, staging.kind, /*may_wait=*/false);
  count(staging, staging.bytes);
  return true;
}

void MemoryAccounts::take_reserved(StorageLock::Held& lock, Staging& staging) {
  at::Tensor idle = user_of(staging).pool.take(staging.bytes, device_of(staging.medium));
  if (!idle.defined()) return fresh(lock, staging);
  use_idle(staging, std::move(idle), staging.bytes);
}

// ---- limits and figures -------------------------------------------------------------------------------------------

bool MemoryAccounts::has_room(Medium at, int64_t bytes) {
  const auto lock = lock_.hold();
  const Account& found = account(at);  // idle scratch would go for it
  return found.used.total() <= found.limit - bytes;
}

void MemoryAccounts::limit(Medium medium, int64_t bytes) {
  const auto lock = lock_.hold();
  account(medium).limit = std::max<int64_t>(0, bytes);
  lock_.changed();
}

ScratchUser MemoryAccounts::add_scratch_user(Reuse reuse) {
  const auto lock = lock_.hold();
  for (Account& account : accounts_) account.users.push_back({ScratchPool(idle_scratch_, reuse), {}});
  return {static_cast<int32_t>(accounts_.front().users.size()) - 1};
}

void MemoryAccounts::limit_scratch(Medium at, int64_t bytes, int32_t user) {
  const auto lock = lock_.hold();
  if (bytes < 0) fail(ErrorKind::kValue, "a limit of scratch is at least 0 bytes, got ", bytes);
  account(at).users.at(user).limit = bytes;
}

void MemoryAccounts::keep_scratch(Medium at, int64_t bytes, int32_t user) {
  const auto lock = lock_.hold();
  account(at).users.at(user).pool.need_room_for(bytes);
}

ScratchUsage MemoryAccounts::scratch_usage(Medium at, int32_t user) {
  const auto lock = lock_.hold();
  const User& found = account(at).users.at(user);
  ScratchUsage usage = found.usage;
  usage.idle = found.pool.idle_bytes();
  return usage;
}

void MemoryAccounts::trim(int32_t user) {
  const auto lock = lock_.hold();
  for (Account& account : accounts_) {
    for (size_t u = 0; u < account.users.size(); ++u)
      if (user < 0 || user == static_cast<int32_t>(u)) account.users[u].pool.trim();
  }
}

Usage MemoryAccounts::usage() {
  const auto lock = lock_.hold();
  Usage usage = events_;
  for (const Account& account : accounts_) {
    usage.media.push_back(account.used);
    usage.media.back().idle = account.idle();
  }
  for (const auto& tier : tiers_) tier->report(usage);
  return usage;
}

void MemoryAccounts::record_copies(bool on) {
  const auto lock = lock_.hold();
  records_copies_ = on;
  copies_.clear();
}

std::vector<CopyRecord> MemoryAccounts::take_copies() {
  const auto lock = lock_.hold();
  return std::exchange(copies_, {});
}

}  // namespace ds::storage
