// The job's store is in the process of its rank 0. Ranks that end later still need it, to make groups and to read the
// status of other ranks. So every rank says goodbye when it ends, and rank 0 keeps the store until all ranks have.
#pragma once
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "base/process.h"
#include "comm/c10d_compat.h"

namespace ds::comm {

class StoreKeeper {
 public:
  // The longest wait of rank 0 for ranks that neither say goodbye nor end, such as killed ranks of other hosts.
  static constexpr std::chrono::seconds kMost{120};

  StoreKeeper(c10::intrusive_ptr<c10d::Store> store, int rank, int world);
  ~StoreKeeper();  // does not wait for other ranks

  // This rank needs the store no more. Idempotent. On rank 0 a thread keeps the store until all ranks have called it.
  void goodbye();
  bool said_goodbye() const { return !store_ || thread_.joinable(); }
  void wait();  // until that thread has released the store; at the end of the process

 private:
  bool all_gone();
  void keep();

  c10::intrusive_ptr<c10d::Store> store_;  // null: released
  const int rank_, world_;
  // With a blank at its end. Read once, because a script may change the environment beside this thread.
  const std::string host_;
  const OwningProcess owner_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace ds::comm
