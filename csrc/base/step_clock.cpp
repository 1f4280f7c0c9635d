#include "base/step_clock.h"

#include <algorithm>

namespace ds {

namespace {

bool is_wait(Phase phase) { return phase >= Phase::kCommunication && phase < Phase::kRest; }
bool trains(Phase phase) { return phase >= Phase::kForward && phase <= Phase::kOptimizer; }

}  // namespace

void StepClock::turn(bool on) {
  const std::lock_guard lock(mutex_);
  if ((users_ += on ? 1 : -1) > 0) return;
  open_.clear();
  begun_ = false;
}

std::thread::id StepClock::count_thread(std::thread::id thread) {
  const std::lock_guard lock(mutex_);
  return std::exchange(thread_, thread);
}

void StepClock::count() {
  const Clock::time_point now = now_();
  const int64_t passed = begun_ ? std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count() : 0;
  last_ = now;
  const auto phase = static_cast<size_t>(open_.empty() ? Phase::kRest : open_.back());
  totals_.wall += passed;
  totals_.all[phase] += passed;
  if (std::find(open_.begin(), open_.end(), Phase::kBackward) != open_.end()) totals_.in_backward[phase] += passed;
}

size_t StepClock::enter(Phase phase) {
  const std::lock_guard lock(mutex_);
  const std::thread::id here = std::this_thread::get_id();
  if (open_.empty() && (trains(phase) || thread_ == std::thread::id())) thread_ = here;
  const bool inside = is_wait(phase) && phase <= Phase::kReduction && !open_.empty() && is_wait(open_.back());
  if (!on() || thread_ != here || inside) return 0;
  count();
  begun_ = true;
  ++totals_.begun;
  open_.push_back(phase);
  return open_.size();
}

void StepClock::leave(size_t mark) {
  const std::lock_guard lock(mutex_);
  if (mark == 0 || open_.size() < mark) return;
  count();
  open_.resize(mark - 1);
}

bool StepClock::in_phase() {
  const std::lock_guard lock(mutex_);
  return !open_.empty() && thread_ == std::this_thread::get_id();
}

void StepClock::leave_last(Phase phase) {
  size_t mark = 0;
  {
    const std::lock_guard lock(mutex_);
    mark = open_.size() - (std::find(open_.rbegin(), open_.rend(), phase) - open_.rbegin());
  }
  leave(mark);
}

StepClock::Totals StepClock::totals() {
  const std::lock_guard lock(mutex_);
  count();
  return totals_;
}

}  // namespace ds
