// The memory of a storage: the bytes of each medium and of each user of scratch, against their limits.
//
// [Note: making room]
// Idle scratch is freed first. Then copies that were prefetched are dropped, oldest first. After that a caller waits as
// long as copies in flight will free memory by themselves; at the end it gets more than the limit, and `over_budget`
// counts that.
#pragma once
#include <functional>
#include <vector>

#include "base/step_clock.h"
#include "storage/plane.h"
#include "storage/scratch_pool.h"
#include "storage/shard_storage.h"
#include "storage/storage_lock.h"

namespace ds::storage {

class MemoryAccounts {
 public:
  // Takes the oldest prefetched copy in a medium, of one user or (-1) of any, out of its plane. Null: there is none.
  using OldestPrefetched = std::function<StagingPtr(Medium, int32_t user)>;

  MemoryAccounts(StorageLock& lock, const Tiers& tiers, c10::Device device, const Budget& budget,
                 OldestPrefetched oldest_prefetched);

  // ---- with the lock; functions that get it may release it in between
  StepClock& clock() { return *clock_; }
  // Throws ErrorKind::kValue where there is no such medium.
  MediumUsage& used(Medium medium) { return account(medium).used; }  // without `idle`
  Usage& events() { return events_; }                                // without the media
  void add(CopyRecord copy) {
    if (records_copies_) copies_.push_back(std::move(copy));
  }
  void reserve(StorageLock::Held& lock, Medium medium, int64_t bytes, int64_t MediumUsage::*kind, bool may_wait);
  // Memory for a copy or for scratch, idle memory of its user first.
  void take(StorageLock::Held& lock, Staging& staging, bool may_wait);
  void give(Staging& staging);
  // Room for a copy that is prefetched; false: only by dropping what was prefetched before, which is wanted sooner.
  bool reserve_prefetch(StorageLock::Held& lock, const Staging& staging);
  void take_reserved(StorageLock::Held& lock, Staging& staging);
  // One copy more (1) or fewer (-1) that frees its memory by itself, or can be dropped at the end of its transfer.
  void count_flight(const Staging& staging, int change);
  // The device of tensors in this medium; a planned step has meta tensors in all media.
  c10::Device device_of(Medium medium) const {
    return medium == Medium::kDevice || device_.is_meta() ? device_ : c10::Device(at::kCPU);
  }

  // ---- as in ShardStorage
  bool has_room(Medium at, int64_t bytes);
  void limit(Medium medium, int64_t bytes);
  ScratchUser add_scratch_user(Reuse reuse);
  void limit_scratch(Medium at, int64_t bytes, int32_t user);
  void keep_scratch(Medium at, int64_t bytes, int32_t user);
  ScratchUsage scratch_usage(Medium at, int32_t user);
  void trim(int32_t user);  // -1: all
  Usage usage();
  const StepClockPtr& step_clock() const { return clock_; }
  void record_copies(bool on);
  std::vector<CopyRecord> take_copies();

 private:
  struct User {
    ScratchPool pool;
    ScratchUsage usage;  // without `idle`
    int64_t limit = INT64_MAX;
    int in_flight = 0;
  };
  struct Account {
    Account(int64_t limit, int64_t idle) : limit(limit), users(1, {ScratchPool(idle), {}}) {}
    int64_t limit;
    std::vector<User> users;  // of scratch and of copies of blocks
    MediumUsage used;
    int in_flight = 0;
    int64_t idle() const;
    int64_t total() const { return used.total() + idle(); }
    void free_idle(int64_t bytes);  // at least this number, if there is as much
  };

  Account& account(Medium medium);
  User& user_of(const Staging& staging) { return account(staging.medium).users.at(staging.user); }
  void count(const Staging& staging, int64_t bytes);
  bool drop_oldest_prefetched(Medium medium, int32_t user);
  bool make_room(Medium medium, int64_t bytes);  // without waiting; false: there is too little
  void make_room_of_user(StorageLock::Held& lock, const Staging& staging, bool may_wait);
  void fresh(StorageLock::Held& lock, Staging& staging);
  void use_idle(Staging& staging, at::Tensor memory, int64_t counted);

  StorageLock& lock_;
  const Tiers& tiers_;
  const c10::Device device_;
  const int64_t idle_scratch_;
  const OldestPrefetched oldest_prefetched_;
  const StepClockPtr clock_ = std::make_shared<StepClock>();
  std::vector<Account> accounts_;
  Usage events_;
  bool records_copies_ = false;
  std::vector<CopyRecord> copies_;
};

}  // namespace ds::storage
