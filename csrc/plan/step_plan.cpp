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
  host_until(host_ + ns, phase_);
  if (synchronous_) reach_host();
}

void StepPlan::dispatched() {
  const std::lock_guard lock(mutex_);
  ++counts_[phase_].dispatched;
}

void StepPlan::compute(int64_t ns, std::string_view name) {
  const std::lock_guard lock(mutex_);
  compute_for(ns, name);
}

void StepPlan::kernel(int64_t ns, std::string_view name) {
  const std::lock_guard lock(mutex_);
  ++counts_[phase_].kernels;
  compute_for(ns, name);
}

void StepPlan::compute_for(int64_t ns, std::string_view name) {
  reach_host();
  ++counts_[phase_].launches;
  if (ns > 0) add_row(kCompute, name, now_, now_ + ns);
  now_ += ns;
  phases_[phase_] += ns;
  if (synchronous_) host_ = now_;
}

int64_t StepPlan::mark() const {
  const std::lock_guard lock(mutex_);
  return std::max(now_, host_);
}

void StepPlan::host_waits(std::string_view what, int64_t mark) {
  const std::lock_guard lock(mutex_);
  wait_on_host(what, mark);
}

void StepPlan::host_waits(std::string_view what) {
  const std::lock_guard lock(mutex_);
  reach_host();
  wait_on_host(what, now_);
}

void StepPlan::wait_on_host(std::string_view what, int64_t mark) {
  if (synchronous_) return;
  ++counts_[phase_].host_waits;
  if (mark > host_) host_until(mark, what);
}

void StepPlan::end() {
  const std::lock_guard lock(mutex_);
  reach_host();
}

void StepPlan::reach_host() {
  if (host_ <= now_) return;
  phases_[phase_] += host_ - now_;
  now_ = host_;
}

void StepPlan::host_until(int64_t then, std::string_view name) {
  StepSpan* last = last_host_row_ == kNoRow ? nullptr : &timeline_[last_host_row_];
  if (last && last->end == host_ && last->name == name && last->phase == phase_) {
    last->end = then;
  } else if (then > host_) {
    last_host_row_ = add_row(kHost, name, host_, then);
  }
  host_ = then;
}

size_t StepPlan::add_row(std::string_view lane, std::string_view name, int64_t begin, int64_t end) {
  if (!recorded_) return kNoRow;
  timeline_.push_back({std::string(lane), std::string(name), phase_, begin, end});
  return timeline_.size() - 1;
}

int64_t StepPlan::start(const std::string& group, int64_t ns, std::string_view name) {
  const std::lock_guard lock(mutex_);
  ++counts_[phase_].collectives;
  if (call_ns_ > 0) host_until(host_ + call_ns_, name);
  int64_t& free = free_at_[group];
  const int64_t begin = std::max({free, now_, host_});
  free = begin + ns;
  communicated_ += ns;
  calls_.push_back({free, add_row(group, name, begin, free)});
  return static_cast<int64_t>(calls_.size()) - 1;
}

void StepPlan::exchange(int64_t ns) {
  const std::lock_guard lock(mutex_);
  ++counts_[phase_].collectives;
  host_until(host_ + ns, "exchange of numbers");
}

void StepPlan::wait(int64_t call) {
  const std::lock_guard lock(mutex_);
  if (call < 0 || call >= static_cast<int64_t>(calls_.size())) return;  // of a step before
  const Call& one = calls_[static_cast<size_t>(call)];
  if (const int64_t idle = std::min(host_, one.end) - now_; idle > 0) {  // until the host asks for the wait
    phases_[phase_] += idle;
    now_ += idle;
  }
  if (one.end <= now_) return;
  waited_ += one.end - now_;
  if (one.row != kNoRow) {
    timeline_[one.row].exposed += one.end - now_;
    add_row(kCompute, "waits for " + timeline_[one.row].name, now_, one.end);
  }
  now_ = one.end;
  if (synchronous_) host_ = now_;
}

void StepPlan::reset() {
  const std::lock_guard lock(mutex_);
  host_ = now_ = waited_ = communicated_ = 0;
  calls_.clear();
  free_at_.clear();
  phases_.clear();
  counts_.clear();
  timeline_.clear();
  last_host_row_ = kNoRow;
}

void StepPlan::record(bool on) {
  const std::lock_guard lock(mutex_);
  recorded_ = on;
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
std::map<std::string, StepCounts> StepPlan::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}
std::vector<StepSpan> StepPlan::timeline() const {
  const std::lock_guard lock(mutex_);
  return timeline_;
}

}  // namespace ds::plan
