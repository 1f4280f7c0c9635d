#include "comm/decorators/call_log.h"

#include <algorithm>
#include <utility>

#include "base/ranges.h"

namespace ds::comm {

namespace {

template <typename Listener>
void change_list(std::vector<Listener>& list, const Listener& listener, bool add) {
  list.erase(std::remove(list.begin(), list.end(), listener), list.end());
  if (add) list.push_back(listener);
}

}  // namespace

void CallRecorder::add(const LoggedCall& call) {
  const std::lock_guard lock(mutex_);
  calls_.push_back(call);
}

std::vector<LoggedCall> CallRecorder::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(calls_, {});
}

void CallLog::change(const std::shared_ptr<CallRecorder>& recorder, bool add) {
  const std::lock_guard lock(mutex_);
  auto changed = std::make_shared<Listeners>(*listeners_);
  change_list(changed->recorders, recorder, add);
  publish(changed);
}

void CallLog::change(const StepWaitsPtr& steps, bool add) {
  const std::lock_guard lock(mutex_);
  auto changed = std::make_shared<Listeners>(*listeners_);
  change_list(changed->steps, steps, add);
  publish(changed);
}

void CallLog::publish(const std::shared_ptr<Listeners>& listeners) {
  listeners_ = listeners;
  records_ = !listeners->recorders.empty();
  waits_ = any_of(listeners->recorders, [](const auto& one) { return one->waits(); });
  on_ = records() || !listeners->steps.empty();
}

CallLog::ListenersPtr CallLog::listeners() const {
  const std::lock_guard lock(mutex_);
  return listeners_;
}

std::string CallLog::caller() const {
  for (const auto& one : listeners()->recorders)
    if (one->caller()) return one->caller()();
  return "";
}

void CallLog::ended(const LoggedCall& call, bool waited) {
  for (const auto& one : listeners()->recorders)
    if (waited || !one->waits()) one->add(call);
}

bool CallLog::enter(std::thread::id thread) {
  const std::lock_guard lock(mutex_);
  return depth_[thread]++ == 0;
}

void CallLog::leave(std::thread::id thread) {
  const std::lock_guard lock(mutex_);
  const auto here = depth_.find(thread);
  if (here != depth_.end() && --here->second <= 0) depth_.erase(here);
}

Blocked::Blocked(const CallLog& log, bool reduces, bool stream) : listeners_(log.listeners()) {
  const auto inside = [](const StepWaitsPtr& one) { return one->clock().in_phase(); };
  const bool chosen = listeners_->steps.size() > 1 && any_of(listeners_->steps, inside);
  for (const StepWaitsPtr& one : listeners_->steps) {
    if (chosen && !inside(one)) continue;
    const size_t mark = one->clock().enter(reduces ? Phase::kReduction : Phase::kCommunication);
    counted_.push_back({one.get(), mark, stream && (mark != 0 || inside(one))});  // else another thread's
    if (counted_.back().stream) one->begin();
  }
}

Blocked::~Blocked() {
  for (size_t i = counted_.size(); i-- > 0;) {
    if (counted_[i].stream) counted_[i].steps->end();
    counted_[i].steps->clock().leave(counted_[i].mark);
  }
}

}  // namespace ds::comm
