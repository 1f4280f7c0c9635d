// Finds the rank for which the others wait, from the times at which the ranks come to their collectives.
//
// A rank is slow when, over some seconds and several collectives, the others have spent most of the time waiting for it
// and for nobody else. Each rank is reported once.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ds::comm {

class SlowRank {
 public:
  explicit SlowRank(int size) : waited_us_(size, 0), reported_(size, false) {}
  // After each collective: when every rank came. Returns a line for the user, or "".
  std::string note(const std::vector<int64_t>& came_us);

 private:
  static constexpr int64_t kWindowUs = 3'000'000;
  static constexpr int kFewest = 5;

  std::vector<int64_t> waited_us_;  // for each rank: how long everybody else was there and it was not
  std::vector<bool> reported_;
  int64_t since_us_ = 0;
  int count_ = 0;
};

}  // namespace ds::comm
