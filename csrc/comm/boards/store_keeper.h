// The job's store lives in the process of its rank 0. Ranks that end later still need it: to make groups, to
// hear where others are. So every rank says goodbye when it is done, and rank 0 keeps the store until all have.
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
  ~StoreKeeper();  // waits no longer

  // This rank needs the store no more; again: nothing happens. On rank 0 a thread keeps it until the others say so,
  // too.
  void goodbye();
  bool said_goodbye() const { return !store_ || thread_.joinable(); }
  void wait();  // until that thread has let go of it; at the end of the process

 private:
  bool all_gone();
  void keep();

  c10::intrusive_ptr<c10d::Store> store_;  // null: it is no longer kept
  const int rank_, world_;
  // With a blank at its end. Read once, because a script may change the environment beside this thread.
  const std::string host_;
  const OwningProcess owner_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace ds::comm
