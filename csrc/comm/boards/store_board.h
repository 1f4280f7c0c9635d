// The boards of ranks that share no memory: in the job's store.
//
// [Note: asking]
// A comparison before every call would cost round trips. So a rank only records its calls, and nothing is sent without
// a failure. A rank that has waited for a second asks, by a counter in the store that the
// watch of every rank looks at twice a second; then all ranks of the group post what they are doing. If two
// ranks wait in calls of the same number that differ, all ranks of the group fail, with a message that names the call
// of each rank. Strict (DS_COMM_FINGERPRINTS=strict), the ranks do compare every call before it starts: gloo
// of torch 1.13 ends the process where sizes differ, before anybody can say why.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/process.h"
#include "comm/boards/board.h"
#include "comm/c10d_compat.h"

namespace ds::comm {

class StoreBoard : public Board {
 public:
  using Store = c10::intrusive_ptr<c10d::Store>;

  // `store`: of this group alone. `timeout`: how long strict ranks wait for each other. `transport`: for flights.
  StoreBoard(Store store, int rank, int size, milliseconds timeout, std::string transport, const GroupFacts& facts);

  // This rank begins a call; its number, for ended(). Throws on every rank alike when the group has failed before.
  int64_t enter(const Record& call);
  void ended(int64_t number);
  void refuse_if_failed() const;  // enter() does it, too
  // This rank begins and ends to wait in a call under way, or for `message`, which has no number. Several threads may
  // wait at once; when one of them ends, the waits of the others are timed anew, since the group has made progress.
  void wait_begins(const Record* message = nullptr);
  void wait_ends();
  // All ranks of the group fail. Returns the first message of the group, with the status of every rank.
  std::string give_up(const std::string& why);
  // The reason of the failure; "": none.
  std::string failed() const;
  // `told` is called once when the group fails on any rank, from any thread.
  void on_failure(std::function<void(const std::string& why)> told);

  void look(const DiagnosticCallbacks& callbacks) override;
  std::vector<Flight> flights() const override { return ring_->read(); }
  std::string transport() const override { return transport_; }

 protected:
  std::vector<RankView> views() override;

 private:
  struct Posted;                                     // what a rank posts
  void compare(const Record& call, int64_t number);  // strict
  void post(const DiagnosticCallbacks& callbacks, const Store& store);
  std::vector<std::unique_ptr<Posted>> posted(const Store& store, int64_t tick) const;
  bool gone(int rank, const Store& store) const;
  void judge(const Store& store);
  void tell(const std::string& why, const Store& store);  // all ranks, with the status of each
  void set_failed(const std::string& why);
  Store store() const;  // fails when it has gone

  const int size_;
  const milliseconds timeout_;
  const std::string transport_;
  const bool strict_;
  const std::string host_;  // host_id() at construction
  const OwningProcess owner_;
  const std::unique_ptr<FlightRing> ring_;
  std::atomic<int64_t> waiting_since_us_{0};
  std::mutex waits_mutex_;  // of changes of waiting_since_us_, and of what follows
  int waits_ = 0;
  Record message_;  // the last one that this rank began to wait for; no name: none since no call was under way
  int64_t number_ = 0;
  std::atomic<int64_t> next_look_us_{0}, asked_{0};
  mutable std::mutex mutex_;  // of what follows
  Store store_;               // null: the store has ended
  DiagnosticCallbacks callbacks_;
  std::thread::id looking_;  // the watch's thread
  std::string failed_;
  std::function<void(const std::string&)> told_;
};

}  // namespace ds::comm
