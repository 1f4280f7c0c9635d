// The board of a rank shows other ranks its last collectives, the reason why it has given up, and, on request, the
// stacks of its threads. The comparison of calls and the report of a failure are the same for every transport. Boards
// are in memory that the ranks share (rank_board.h), or in the job's store (store_board.h).
#pragma once
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/boards/watch.h"

namespace ds::comm {

// "" where all of `calls`, of these ranks, may meet with `mine`; else a text that says which rank calls what.
struct RankCall {
  int rank;
  Record call;
};
std::string mismatch(const std::vector<RankCall>& calls, const Record& mine, int64_t number);
// "" where each rank takes what the others give it. `calls`: of all ranks of the group, without a mismatch.
std::string unbalanced(const std::vector<RankCall>& calls, int64_t number);

// The state of another rank, as known to a rank that has failed.
struct RankView {
  std::string called;  // rank 1 (rank 5 of the job, process 123)
  std::string status;  // its call when the question came up: status_of(flights)
  std::string stack;   // of its threads; or, in parentheses, the reason why it is unknown; "": none
  std::vector<Flight> flights;
  int32_t job_rank = -1;
  int64_t pid = -1;
};
// "in all_reduce(...), number 7, for 1.2 s": the oldest call under way, else the last one.
std::string status_of(const std::vector<Flight>& flights);
std::string seconds_text(int64_t us);                           // "1.2 s"
const Flight* oldest_open(const std::vector<Flight>& flights);  // null: none is under way

class Board : public Watched {
 public:
  static constexpr milliseconds kAnswer{2000};  // the time that ranks have to post their status

  Board(int rank, const GroupFacts& facts);

  // The text for a group that has failed because of `why`. For each rank it has the call, its duration and, where the
  // rank answers in time, its Python stack; then the file with the flight recorders of all ranks.
  std::string report(const std::string& why);
  void warn(const std::string& text);  // to the log of this process, from the watch's thread

  void look(const DiagnosticCallbacks& callbacks) override;
  std::string name() const override { return name_; }

 protected:
  virtual std::vector<RankView> views() = 0;  // of all ranks, by rank

  const int rank_, job_rank_;
  const std::string name_;

 private:
  std::string write_flights(const std::string& why, const std::vector<RankView>& ranks) const;

  const std::string folder_;  // of the files; the watch's thread does not read the environment: scripts change it
  std::mutex mutex_;
  std::vector<std::string> warnings_;
  std::atomic<bool> has_warnings_{false};
};

}  // namespace ds::comm
