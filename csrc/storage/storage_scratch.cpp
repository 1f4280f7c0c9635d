// Scratch of StorageState: memory of no plane, and who has lent it.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "storage/flat_view.h"
#include "storage/storage_state.h"

namespace ds::storage {

Lease StorageState::scratch(int64_t numel, at::ScalarType type, Medium at, int32_t user) {
  if (numel < 0) fail(ErrorKind::kValue, "scratch of ", numel, " elements");
  Lock lock(mutex_);
  auto staging = std::make_shared<Staging>();
  staging->medium = at;
  staging->bytes = numel * static_cast<int64_t>(c10::elementSize(type));
  staging->user = user;
  staging->memory = take(lock, at, staging->bytes, &MediumUsage::scratch, /*may_wait=*/true, user);
  Account::User& used = account(at).users[user];
  used.usage.lent += staging->bytes;
  used.usage.peak = std::max(used.usage.peak, used.usage.lent + used.pool.idle_bytes());
  ++counts_.leases;
  Lease lease;
  lease.data_ = flat_view(staging->memory, 0, type, numel);
  lease.staging_ = std::move(staging);
  lease.state_ = shared_from_this();
  return lease;
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
