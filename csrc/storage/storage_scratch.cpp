// Scratch of StorageState: memory of no plane, and who has lent it.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/sizes.h"
#include "storage/flat_view.h"
#include "storage/storage_state.h"

namespace ds::storage {

Lease StorageState::scratch(int64_t numel, at::ScalarType type, Medium at, int32_t user) {
  if (numel < 0) fail(ErrorKind::kValue, "scratch of ", numel, " elements");
  Lock lock(mutex_);
  auto staging = std::make_shared<Staging>();
  staging->medium = at;
  staging->bytes = sizes::product("bytes of scratch", numel, static_cast<int64_t>(c10::elementSize(type)));
  staging->user = user;
  staging->memory = take(lock, at, staging->bytes, &MediumUsage::scratch, /*may_wait=*/true, user);
  ++counts_.leases;
  Lease lease;
  lease.data_ = flat_view(staging->memory, 0, type, numel);
  lease.staging_ = std::move(staging);
  lease.state_ = shared_from_this();
  return lease;
}

// ---- users --------------------------------------------------------------------------------------------------------

void StorageState::count_user(Medium medium, int32_t user, int64_t bytes) {
  Account::User& used = account(medium).users.at(user);
  used.usage.lent += bytes;
  used.usage.peak = std::max(used.usage.peak, used.usage.lent + used.pool.idle_bytes());
}

void StorageState::count_flight(const Staging& staging, int change) {
  Account& account = this->account(staging.medium);
  account.in_flight += change;
  account.users[staging.user].in_flight += change;
}

void StorageState::make_room_of_user(Lock& lock, Medium medium, int64_t bytes, bool may_wait, int32_t user) {
  for (bool waited = false;;) {
    Account& account = this->account(medium);
    Account::User& own = account.users.at(user);
    const int64_t idle = own.pool.idle_bytes(), excess = own.usage.lent + idle - (own.limit - bytes);
    if (excess <= 0) return;
    if (idle > 0) {
      own.pool.trim(std::max<int64_t>(0, idle - excess));
    } else if (!drop_oldest_prefetched(medium, user)) {
      if (!may_wait || own.in_flight == 0) {
        account.used.over_budget += bytes > 0;
        return;
      }
      counts_.budget_waits += !std::exchange(waited, true);
      wait(lock);
    }
  }
}

void StorageState::limit_scratch(Medium at, int64_t bytes, int32_t user) {
  const Lock lock(mutex_);
  if (bytes < 0) fail(ErrorKind::kValue, "a limit of scratch is at least 0 bytes, got ", bytes);
  account(at).users.at(user).limit = bytes;
}

int32_t StorageState::add_scratch_user(bool keeps) {
  const Lock lock(mutex_);
  for (Account& account : accounts_) account.users.push_back({ScratchPool(keeps ? idle_scratch_ : 0), {}, keeps});
  return static_cast<int32_t>(accounts_.front().users.size()) - 1;
}

void StorageState::keep_scratch(Medium at, int64_t bytes, int32_t user) {
  const Lock lock(mutex_);
  account(at).users.at(user).pool.need_room_for(bytes);
}

bool StorageState::has_room(Medium at, int64_t bytes) const {
  const Lock lock(mutex_);
  const Account& found = accounts_.at(static_cast<size_t>(at));  // idle scratch would go for it
  return found.total() - found.idle() <= found.limit - bytes;
}

ScratchUsage StorageState::scratch_usage(Medium at, int32_t user) const {
  const Lock lock(mutex_);
  const Account::User& found = accounts_.at(static_cast<size_t>(at)).users.at(user);
  ScratchUsage usage = found.usage;
  usage.idle = found.pool.idle_bytes();
  return usage;
}

void StorageState::trim(int32_t user) {
  const Lock lock(mutex_);
  for (Account& account : accounts_) {
    for (size_t u = 0; u < account.users.size(); ++u)
      if (user < 0 || user == static_cast<int32_t>(u)) account.users[u].pool.trim();
  }
}

}  // namespace ds::storage
