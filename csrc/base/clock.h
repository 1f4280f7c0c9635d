// The clock of waits and timings, which no change of the time of day moves.
#pragma once
#include <chrono>

namespace ds {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace ds
