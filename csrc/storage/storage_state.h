// The state that a ShardStorage shares with its leases. See the notes in shard_storage.h.
#pragma once
#include <condition_variable>
#include <mutex>
#include <optional>

#include "storage/plane.h"
#include "storage/scratch_pool.h"
#include "storage/shard_storage.h"
#include "storage/transfer_threads.h"

namespace ds::storage {

class StorageState : public std::enable_shared_from_this<StorageState> {
 public:
  StorageState(c10::Device device, Budget budget, const FileAccess& files);

  // As in ShardStorage.
  int32_t add(std::string name, int64_t numel, at::ScalarType type, const Placement& placement, const Cuts& cuts,
              const PlaneExtras& extras);
  void remove(int32_t number);
  Lease acquire(int32_t number, plan::Range range, Access access, Medium at);
  void discard(int32_t number, plan::Range range);
  void prefetch(int32_t number, plan::Range range, Medium at);
  bool here(int32_t number, plan::Range range, Medium at) const;
  std::optional<Medium> resting(int32_t number, plan::Range range) const;
  Lease scratch(int64_t numel, at::ScalarType type, Medium at, int32_t user);
  bool has_room(Medium at, int64_t bytes) const;
  int32_t add_scratch_user(bool keeps);
  void limit_scratch(Medium at, int64_t bytes, int32_t user);
  void keep_scratch(Medium at, int64_t bytes, int32_t user);
  ScratchUsage scratch_usage(Medium at, int32_t user) const;
  void trim(int32_t user);  // -1: all
  at::Tensor resident(int32_t number, plan::Range range);
  void move(std::vector<int32_t> numbers, const Placement& placement, bool wait_each);
  Placement placement(int32_t number) const;
  plan::Range all_of(int32_t number) const;
  std::vector<at::Tensor> memory(int32_t number) const;
  void settle();
  void limit(Medium medium, int64_t bytes);
  void at_exit() noexcept;
  void close();  // nobody will acquire anything any more: planes without leases go
  Usage usage() const;
  c10::Device device() const { return device_; }

  void release(Lease& lease) noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Account {
    struct User {
      ScratchPool pool;
      ScratchUsage usage;  // without `idle`
      bool keeps = true;
      int64_t limit = INT64_MAX;
      int in_flight = 0;  // as below
    };
    explicit Account(int64_t limit, int64_t idle) : limit(limit), users(1, {ScratchPool(idle), {}}) {}
    int64_t limit;
    std::vector<User> users;  // of scratch and of copies of blocks
    MediumUsage used;         // without `idle`
    int in_flight = 0;        // copies that will free their memory, or can be dropped then
    int64_t idle() const {
      int64_t bytes = 0;
      for (const User& user : users) bytes += user.pool.idle_bytes();
      return bytes;
    }
    int64_t total() const { return used.resting + used.staged + used.scratch + idle(); }
    void free_idle(int64_t bytes);  // at least so many, where there are
  };

  // ---- storage_state.cpp: exclusion, memory, planes; scratch: storage_scratch.cpp
  PlanePtr plane_of(int32_t number) const;
  Account& account(Medium medium);
  c10::Device device_of(Medium medium) const { return medium == Medium::kDevice ? device_ : c10::Device(at::kCPU); }
  void check_range(const Plane& plane, plan::Range range, Medium at);
  void wait(Lock& lock);  // for anything that changes
  void changed();
  void wait_for_blocks(Lock& lock, const Plane& plane, int32_t first, int32_t end, bool alone);
  static void mark(Plane& plane, int32_t first, int32_t end, bool alone);
  void unmark(Plane& plane, int32_t first, int32_t end, bool alone, const FencePtr& fence);
  // The current stream waits for earlier work of other streams on these blocks.
  void wait_for_streams(const Plane& plane, int32_t first, int32_t end) const;
  bool make_room(Account& account, int64_t bytes);  // of what nobody waits for; false: there is none
  void make_room_of_user(Lock& lock, Medium medium, int64_t bytes, bool may_wait, int32_t user);
  void count_user(Medium medium, int32_t user, int64_t bytes);
  void count_flight(const Staging& staging, int change);
  void reserve(Lock& lock, Medium medium, int64_t bytes, int64_t MediumUsage::*kind, bool may_wait);
  at::Tensor take(Lock& lock, Medium medium, int64_t bytes, int64_t MediumUsage::*kind, bool may_wait,
                  int32_t user = 0);
  at::Tensor fresh(Lock& lock, Medium medium, int64_t bytes);  // not counted here
  void give(Medium medium, at::Tensor memory, int64_t bytes, int64_t MediumUsage::*kind, int32_t user = 0);
  void open_parts(Lock& lock, Plane& plane, const Placement& placement, std::vector<PlanePart>& parts);
  void close_parts(Plane& plane, std::vector<PlanePart>& parts);
  void lock_planes(Lock& lock, const std::vector<PlanePtr>& planes);
  void copy_plane(Plane& plane, std::vector<PlanePart>& to, bool wait_each);

  // ---- transfers.cpp: copies of blocks
  StagingPtr stage(Lock& lock, Plane& plane, plan::Range range, int32_t first, int32_t end, Access access, Medium at);
  StagingPtr new_staging(const Plane& plane, int32_t first, int32_t end, Medium at) const;
  void allocate(Lock& lock, Staging& staging, bool may_wait);
  void drop(const StagingPtr& staging);
  void drop_prefetched(Plane& plane, int32_t first, int32_t end);
  bool drop_oldest_prefetched(Medium medium, int32_t user = -1);
  // One block, to or from its place in `staging`, which starts at block staging.first. Without the lock. Counted.
  void transfer(const Plane& plane, const PlanePart& part, int32_t block, const Staging& staging, bool fetch,
                bool in_background);
  void transfer_block(const Plane& plane, const PlanePart& part, int32_t block, const Staging& staging, bool fetch,
                      bool in_background);
  void fetch_in_background(const PlanePtr& plane, const StagingPtr& staging);
  void write_back(const PlanePtr& plane, const StagingPtr& staging, const FencePtr& fence);
  void in_background(std::function<void()> job) noexcept;

  const c10::Device device_;
  const int64_t idle_scratch_;
  const std::vector<std::unique_ptr<Tier>> tiers_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  std::vector<PlanePtr> planes_;  // null: removed
  std::vector<Account> accounts_;
  Usage counts_;  // without the media
  int jobs_ = 0;  // in the background
  std::vector<FailurePtr> failures_;
  TransferThreads threads_;  // last: its jobs use all of the above
};

}  // namespace ds::storage
