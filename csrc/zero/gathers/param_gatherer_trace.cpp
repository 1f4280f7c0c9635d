// The order of uses of a gatherer: what is wanted again, and what next.
#include <algorithm>

#include "base/ranges.h"
#include "plan/learned_order.h"
#include "zero/gathers/param_gatherer.h"

namespace ds::zero {

void ParamGatherer::note(int32_t unit) {
  recording_.push_back(unit);
  const auto found =
      std::find(trace_.begin() + static_cast<std::ptrdiff_t>(std::min(cursor_, trace_.size())), trace_.end(), unit);
  if (found != trace_.end()) cursor_ = static_cast<size_t>(found - trace_.begin()) + 1;
}

void ParamGatherer::learn_trace() {
  std::vector<int32_t> now;
  for (size_t unit = 0; unit < units_.size(); ++unit)
    if (left_out(units_[unit])) now.push_back(static_cast<int32_t>(unit));
  if (now.empty() && unseen_.empty()) {
    trace_ = std::move(recording_);
    return;
  }
  const auto order_of = [](const std::vector<int32_t>& units, const std::vector<int32_t>& unseen) {
    plan::LearnedOrder order{{}, unseen};
    for (int32_t unit : units) order.entries.push_back({unit});
    return order;
  };
  erase_if(recording_, [&](int32_t unit) { return contains(now, unit); });
  plan::LearnedOrder next = order_of(recording_, now);
  if (!trace_.empty()) next = plan::merged(order_of(trace_, unseen_), next).value_or(next);
  trace_.clear();
  for (const auto& entry : next.entries) trace_.push_back(entry.front());
  unseen_ = next.unseen;
}

bool ParamGatherer::wanted_soon(int32_t unit) const {
  if (unit < 0 || live_ > options_.max_live_numel) return false;
  int64_t distance = 0;
  for (size_t i = cursor_; i < trace_.size(); ++i) {
    if (trace_[i] == unit) return true;
    distance += units_[trace_[i]].numel;
    if (distance > options_.max_reuse_numel) return false;
  }
  return false;
}

// Whole units, until they have as many elements as may be fetched ahead.
std::vector<ShardedParam*> ParamGatherer::wanted_next() const {
  std::vector<ShardedParam*> result;
  int64_t numel = 0;
  for (size_t i = cursor_; i < trace_.size() && numel < options_.prefetch_numel; ++i) {
    std::vector<ShardedParam*> unit;
    for (ShardedParam* param : units_[trace_[i]].params) {
      if (param->available() || left_out_.count(param) || contains(result, param)) continue;
      numel += param->numel();
      unit.push_back(param);
    }
    if (live_ + numel > options_.max_live_numel) return result;
    append(result, unit);
  }
  return result;
}

}  // namespace ds::zero
