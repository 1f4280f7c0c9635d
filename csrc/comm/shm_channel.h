// How ranks of one host meet: barriers in shared memory, and what each rank is doing, for all others to read.
//
// [Note: meeting]
// A rank writes only into its own segment. A barrier is a counter that a rank raises and the others wait for: they spin
// for some microseconds where every rank has a core of its own, then sleep on a futex. A sleeper looks up several times
// a second for ranks that have died, failed or are overdue, so that nobody waits for ever and the message has a name.
//
// [Note: records]
// Before the first barrier of a collective a rank writes down what it calls; behind the barrier it compares that with
// what the others wrote. Two records in turn are enough: a rank can write record k + 2 only after it has passed a
// barrier of k + 1, into which every other rank goes only when it has read record k.
#pragma once
#include <c10/core/ScalarType.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/shared_segments.h"

namespace ds::comm {

// What a rank says of the collective it enters.
struct Record {
  char what[24] = "";  // name of the operation
  int32_t type = -1;   // c10::ScalarType
  int32_t op = -1;     // RowOp
  int32_t root = -1;
  int32_t own = 0;      // 1: numel may differ between the ranks
  int64_t numel = 0;    // elements of the tensor that this rank gives
  int64_t longest = 0;  // not compared: whatever the operation wants all ranks to know
};

std::string describe(const Record& record);

class ShmChannel {
 public:
  static constexpr int64_t kBytes = 4096;  // what the channel needs at the start of each segment

  ShmChannel(int rank, std::shared_ptr<SharedSegments> segments, std::chrono::milliseconds patience);
  ~ShmChannel();

  // Enters a collective: records it, meets the others, fails on every rank alike when they are not at the same one.
  void enter(const Record& record);
  const Record& record_of(int rank) const;  // of the collective entered last
  void barrier();

  // This rank cannot go on: the others stop, too, with this text.
  void give_up(const std::string& why);
  int64_t entered() const { return entered_; }
  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }  // from any thread

 private:
  struct Line;
  Line* line(int rank) const;
  void wait_for(int rank, uint32_t count);
  void look_after(int rank, std::chrono::steady_clock::time_point since);

  int rank_;
  std::shared_ptr<SharedSegments> segments_;
  std::atomic<std::chrono::milliseconds> patience_;
  int spins_;
  uint32_t met_ = 0;
  int64_t entered_ = 0;
};

}  // namespace ds::comm
