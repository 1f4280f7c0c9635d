#include "plan/gather_schedule.h"

#include <algorithm>

#include "base/ranges.h"

namespace ds::plan {

namespace {

bool has(const GatherSchedule::Params& sorted, int32_t param) {
  return std::binary_search(sorted.begin(), sorted.end(), param);
}

}  // namespace

size_t GatherSchedule::end() const { return turn_ ? std::min(*turn_, schedule_.size()) : schedule_.size(); }

GatherAct GatherSchedule::toward(const Params& missing) const {
  if (!on_schedule()) return {true, 0, 0};
  uint8_t note = 0;
  for (int32_t param : missing) {
    if (has(schedule_[cursor_], param)) {
      note |= kWanted;
    } else if (std::none_of(schedule_.begin() + static_cast<std::ptrdiff_t>(cursor_) + 1, schedule_.end(),
                            [&](const Params& entry) { return has(entry, param); })) {
      note |= kDiverged;
    }
  }
  return {false, cursor_, note};
}

GatherAct GatherSchedule::toward_end() const {
  return on_schedule() ? GatherAct{false, cursor_, 0} : GatherAct{true, 0, 0};
}

std::optional<GatherAct> GatherSchedule::ahead(const Params& soon) const {
  if (!on_schedule()) return {};
  const Params& next = schedule_[cursor_];
  if (!all_of(next, [&](int32_t param) { return has(soon, param); })) return {};
  return GatherAct{false, cursor_, kWanted};
}

std::optional<size_t> GatherSchedule::due(bool ending) const {
  // Before entry k: the notes of entry k - lag. Before an exchange on the way to the end: all.
  const bool all = ending && !on_schedule();
  if (read_ < cursor_ && (all || read_ + lag_ <= cursor_)) return read_;
  return {};
}

void GatherSchedule::seen(size_t entry, const std::vector<uint8_t>& notes) {
  read_ = entry + 1;
  for (uint8_t note : notes) {
    if (note & kWanted) wanted_[entry] = true;
    if ((note & kDiverged) && !turn_) turn_ = entry + lag_;
  }
}

void GatherSchedule::issued(const GatherAct& act) {
  cursor_ = act.entry + 1;
  wanted_.push_back(false);
}

bool GatherSchedule::exchanged(const Params& wanted) {
  if (wanted.empty()) {
    if (open_) close();
    return false;
  }
  if (!open_) {
    open_ = true;
    following_ = trusted_ && !schedule_.empty() && schedule_.front() == wanted;
    if (following_) {
      cursor_ = read_ = 1;  // the exchange has gathered it
      wanted_.assign(1, true);
      return true;
    }
  }
  if (agreed_.size() < kLongest) agreed_.push_back(wanted);
  return true;
}

void GatherSchedule::close() {
  std::vector<Params> next;
  for (size_t entry = 0; entry < cursor_; ++entry)
    if (wanted_[entry]) next.push_back(schedule_[entry]);
  const bool diverged = !following_ || turn_ || !agreed_.empty();
  append(next, agreed_);
  open_ = following_ = false;
  cursor_ = read_ = 0;
  turn_.reset();
  wanted_.clear();
  agreed_.clear();
  learn(std::move(next), diverged);
}

// A cycle that kept to the schedule leaves out what nobody wanted. One that did not is an exception at first, an
// evaluation between two steps, for example: the schedule changes when the same cycle has come twice.
void GatherSchedule::learn(std::vector<Params> next, bool diverged) {
  const bool learnable = next.size() < kLongest;
  if (!diverged || (schedule_.empty() && learnable) || (learnable && next == candidate_)) {
    schedule_ = std::move(next);
    candidate_.clear();
    trusted_ = true;
    divergences_ = 0;
    return;
  }
  if (++divergences_ >= kMaxDivergences) trusted_ = false;
  candidate_ = learnable ? std::move(next) : std::vector<Params>{};
}

}  // namespace ds::plan
