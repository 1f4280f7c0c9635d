#include "plan/gather_schedule.h"

#include <algorithm>

#include "base/ranges.h"

namespace ds::plan {

namespace {

bool has(const GatherSchedule::Params& sorted, int32_t param) {
  return std::binary_search(sorted.begin(), sorted.end(), param);
}

}  // namespace

// FNV-1a.
uint64_t GatherSchedule::left_out_key() const {
  uint64_t key = 14695981039346656037u;
  for (int32_t param : asked_) key = (key ^ static_cast<uint32_t>(param)) * 1099511628211u;
  return key;
}

GatherAct GatherSchedule::toward(const Params& missing) const {
  if (!on_schedule()) return {true, 0, false};
  return {false, cursor_, !common(current_[cursor_], missing).empty()};
}

GatherAct GatherSchedule::toward_end() const {
  return on_schedule() ? GatherAct{false, cursor_, false} : GatherAct{true, 0, false};
}

std::optional<GatherAct> GatherSchedule::ahead(const Params& soon) const {
  if (!on_schedule()) return {};
  const Params& next = current_[cursor_];
  if (!all_of(next, [&](int32_t param) { return has(soon, param); })) return {};
  return GatherAct{false, cursor_, true, true};
}

void GatherSchedule::needs(const Params& params) {
  erase_if(early_, [&](const Params& entry) { return !common(entry, params).empty(); });
}

void GatherSchedule::issued(const GatherAct& act) {
  if (act.early) early_.push_back(current_[act.entry]);
  if (act.wanted) wanted_[act.entry / 32] |= 1u << (act.entry % 32);
  cursor_ = act.entry + 1;
}

bool GatherSchedule::exchanged(const Params& wanted, bool alike, size_t waiting, const Bits& entries) {
  if (wanted.empty()) {
    steady_ = steady_ && alike && asked_ == left_out_;
    wanted_ = entries;
    if (open_) close();
    return false;
  }
  if (!open_) {
    open(wanted, alike);
    if (following_) return true;
  }
  if (agreed_.size() < kLongest) {
    agreed_.push_back(wanted);
    waiting_.push_back(waiting);
  }
  return true;
}

void GatherSchedule::open(const Params& wanted, bool alike) {
  open_ = true;
  steady_ = alike;
  left_out_ = alike ? asked_ : Params{};
  current_.clear();
  places_.clear();
  for (size_t place = 0; place < schedule_.entries.size(); ++place) {
    Params rest = without(schedule_.entries[place], left_out_);
    if (rest.empty()) continue;
    current_.push_back(std::move(rest));
    places_.push_back(place);
  }
  size_t first = 0;
  while (!confirmed_ && first < current_.size() && current_[first] != wanted) ++first;
  following_ = trusted_ && first < current_.size() && current_[first] == wanted;
  if (!following_) return;
  cursor_ = first + 1;  // the exchange has gathered it
  wanted_.assign((current_.size() + 31) / 32, 0);
  wanted_[first / 32] |= 1u << (first % 32);
}

void GatherSchedule::close() {
  if (following_ && agreed_.empty()) {
    if (steady_) keep_wanted();
    confirmed_ = true;
    candidate_.reset();
    divergences_ = 0;
  } else {
    learn(run());
  }
  open_ = following_ = false;
  cursor_ = 0;
  wanted_.clear();
  agreed_.clear();
  waiting_.clear();
  early_.clear();
}

// The gathers of a cycle that left the schedule, in the order of their use: an exchange came before the entries that
// waited then.
LearnedOrder GatherSchedule::run() const {
  std::vector<Params> wanted;
  for (size_t entry = 0; entry < cursor_; ++entry)
    if (is_wanted(entry)) wanted.push_back(current_[entry]);
  LearnedOrder result{{}, left_out_};
  auto next = wanted.begin();
  for (size_t i = 0; i < agreed_.size(); ++i) {
    while (wanted.end() - next > static_cast<std::ptrdiff_t>(waiting_[i])) result.entries.push_back(*next++);
    result.entries.push_back(without(agreed_[i], left_out_));
  }
  result.entries.insert(result.entries.end(), next, wanted.end());
  erase_if(result.entries, [](const Params& entry) { return entry.empty(); });
  return result;
}

// A cycle that kept to the schedule: what nobody wanted goes, what was left out stays.
void GatherSchedule::keep_wanted() {
  for (size_t entry = 0; entry < current_.size(); ++entry) {
    Params& place = schedule_.entries[places_[entry]];
    if (!is_wanted(entry)) place = common(place, left_out_);
  }
  erase_if(schedule_.entries, [](const Params& entry) { return entry.empty(); });
  schedule_.unseen = common(schedule_.unseen, left_out_);
}

// A cycle that did not is an exception at first, an evaluation between two steps, for example. The schedule changes
// when the cycle adds what was left out before, or when the same cycle has come twice.
void GatherSchedule::learn(LearnedOrder run) {
  const bool learnable = steady_ && run.entries.size() < kLongest;
  std::optional<LearnedOrder> next;
  if (learnable && schedule_.entries.empty()) next = run;
  const bool adds = any_of(run.entries, [&](const Params& entry) { return !common(entry, schedule_.unseen).empty(); });
  if (learnable && !next) next = merged(schedule_, run, /*shrinks=*/adds);
  if (learnable && !next && candidate_) next = merged(*candidate_, run);
  if (next) {
    confirmed_ = !schedule_.entries.empty();
    schedule_ = std::move(*next);
    candidate_.reset();
    trusted_ = true;
    divergences_ = 0;
    return;
  }
  if (++divergences_ >= kMaxDivergences) trusted_ = false;
  candidate_.reset();
  if (learnable) candidate_ = std::move(run);
}

}  // namespace ds::plan
