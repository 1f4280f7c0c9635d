#include "plan/step_plan.h"

#include <algorithm>
#include <utility>

namespace ds::plan {

int64_t LinkCost::time_of(int64_t sent_bytes, int ranks) const {
  if (ranks < 2 || bytes_per_second <= 0) return 0;
  int64_t rounds = 0;
  while ((int64_t{1} << rounds) < ranks) ++rounds;
  const double seconds = static_cast<double>(sent_bytes) / static_cast<double>(bytes_per_second);
  return rounds * latency_ns + static_cast<int64_t>(seconds * 1e9);
}

void StepPlan::set_phase(std::string phase) {
  const std::lock_guard lock(mutex_);
  phase_ = std::move(phase);
}

void StepPlan::host(int64_t ns) {
  const std::lock_guard lock(mutex_);
  host_ += ns;
  if (synchronous_) reach_host();
}

void StepPlan::compute(int64_t ns) {
  const std::lock_guard lock(mutex_);
  reach_host();
  now_ += ns;
  phases_[phase_] += ns;
  if (synchronous_) host_ = now_;
}

void StepPlan::synchronize() {
  const std::lock_guard lock(mutex_);
  reach_host();
  host_ = now_;
}

void StepPlan::reach_host() {
  if (host_ <= now_) return;
  phases_[phase_] += host_ - now_;
  now_ = host_;
}

int64_t StepPlan::start(const std::string& group, int64_t ns) {
  const std::lock_guard lock(mutex_);
  int64_t& free = free_at_[group];
  free = std::max({free, now_, host_}) + ns;
  communicated_ += ns;
  ends_.push_back(free);
  return static_cast<int64_t>(ends_.size()) - 1;
}

void StepPlan::wait(int64_t call) {
  const std::lock_guard lock(mutex_);
  if (call < 0 || call >= static_cast<int64_t>(ends_.size())) return;  // of a step before
  const int64_t end = ends_[static_cast<size_t>(call)];
  if (end <= now_) return;
  waited_ += end - now_;
  now_ = end;
  if (synchronous_) host_ = now_;
}

void StepPlan::reset() {
  const std::lock_guard lock(mutex_);
  host_ = now_ = waited_ = communicated_ = 0;
  ends_.clear();
  free_at_.clear();
  phases_.clear();
}

int64_t StepPlan::now() const {
  const std::lock_guard lock(mutex_);
  return now_;
}
std::map<std::string, int64_t> StepPlan::phases() const {
  const std::lock_guard lock(mutex_);
  return phases_;
}
int64_t StepPlan::waited() const {
  const std::lock_guard lock(mutex_);
  return waited_;
}
int64_t StepPlan::communicated() const {
  const std::lock_guard lock(mutex_);
  return communicated_;
}

}  // namespace ds::plan
