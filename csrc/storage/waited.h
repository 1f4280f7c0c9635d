// Adds the time of its own life to a number of seconds; with a clock, a step has waited for other memory meanwhile.
#pragma once

#include "base/clock.h"
#include "base/step_clock.h"

namespace ds::storage {

class Waited {
 public:
  explicit Waited(double& seconds, StepClock* clock = nullptr)
      : seconds_(seconds), clock_(clock), mark_(clock && clock->on() ? clock->enter(Phase::kOffload) : 0) {}
  ~Waited() {
    if (mark_) clock_->leave(mark_);
    seconds_ += seconds_since(begin_);
  }
  Waited(const Waited&) = delete;
  Waited& operator=(const Waited&) = delete;

 private:
  double& seconds_;
  StepClock* const clock_;
  const size_t mark_;
  const Clock::time_point begin_ = Clock::now();
};

}  // namespace ds::storage
