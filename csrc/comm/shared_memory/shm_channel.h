// Ranks of one host meet here: barriers in shared memory, and records of the calls of each rank for all others.
//
// [Note: meeting]
// A rank writes only into its own segment. A barrier is a counter that a rank raises and the others wait for: they spin
// for some microseconds where every rank has a core of its own, then sleep on a futex. A sleeper looks up several times
// a second for ranks that have died, failed or are overdue, so that nobody waits for ever and the message has a name.
//
// If there are more ranks than cores, waiting for one rank after the other would wake each rank as often as there are
// other ranks. In that case ranks also count arrivals in rank 0's segment, and the last one to arrive wakes all: one
// sleep for each rank and barrier.
//
// [Note: records]
// Before the first barrier of a collective a rank writes down what it calls; behind the barrier it compares that with
// what the others wrote. Two records in turn are enough: a rank can write record k + 2 only after it has passed a
// barrier of k + 1, into which every other rank goes only when it has read record k.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/boards/rank_board.h"
#include "comm/boards/record.h"
#include "comm/boards/slow_rank.h"

namespace ds::comm {

class ShmChannel {
 public:
  static constexpr int64_t kBytes = 4096 + RankBoard::kBytes;  // that it needs at the start of each segment

  ShmChannel(int rank, std::shared_ptr<SharedSegments> segments, milliseconds timeout, GroupFacts facts);
  ~ShmChannel();

  // Enters a collective: records it, meets the others, fails on every rank alike when they are not at the same one, or
  // when what ranks give each other is not what they take. `which`: says of the latter which ranks these are.
  void enter(Record record, const std::function<std::string()>& which = nullptr);
  void refuse_if_failed() const;            // enter does it, too
  void leave();                             // the collective entered last has ended on this rank
  const Record& record_of(int rank) const;  // of the collective entered last
  void barrier();

  int64_t entered() const { return entered_; }
  // For whoever waits for `rank` by other means, several times a second, since `since`: fails when it cannot come any
  // more or is overdue, or when another rank has given up. From any thread.
  void look_after(int rank, Clock::time_point since, const std::string& what);
  void set_timeout(milliseconds timeout) { timeout_ = timeout; }  // from any thread

  // This rank cannot go on: the others stop, too, with this text, and everybody says where it is.
  [[noreturn]] void give_up(const std::string& why);
  // The same from any thread, for whoever waits here: it fails with this text.
  void stop(const std::string& why) noexcept;

 private:
  struct Line;
  Line* line(int rank) const;
  bool is_here(int rank, uint32_t count) const;
  void wait_for(int rank, uint32_t count);
  void wait_for_last(uint32_t count);
  void still_missing(int rank, Clock::time_point since);
  std::string waiting_in() const;
  void note_arrivals();

  int rank_;
  std::shared_ptr<SharedSegments> segments_;
  std::shared_ptr<RankBoard> board_;
  std::shared_ptr<Watch> watch_;
  std::atomic<milliseconds> timeout_;
  const bool checks_;  // DS_COMM_FINGERPRINTS=0: no comparison and no flight record, to measure what they cost
  int spins_;
  bool crowded_ = false;  // on some rank ranks outnumber cores; known in the first barrier
  uint32_t met_ = 0;
  std::atomic<int64_t> entered_{0};
  std::atomic<bool> giving_up_{false};
  std::unique_ptr<SlowRank> slow_;  // rank 0
  std::vector<int64_t> came_us_;
  std::vector<bool> overdue_;  // ranks about which rank 0 has said so
};

}  // namespace ds::comm
