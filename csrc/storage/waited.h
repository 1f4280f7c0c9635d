// Adds the time of its own life to a number of seconds.
#pragma once

#include "base/clock.h"

namespace ds::storage {

class Waited {
 public:
  explicit Waited(double& seconds) : seconds_(seconds) {}
  ~Waited() { seconds_ += seconds_since(begin_); }
  Waited(const Waited&) = delete;
  Waited& operator=(const Waited&) = delete;

 private:
  double& seconds_;
  const Clock::time_point begin_ = Clock::now();
};

}  // namespace ds::storage
