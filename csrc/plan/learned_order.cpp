#include "plan/learned_order.h"

#include <algorithm>
#include <iterator>
#include <unordered_map>

namespace ds::plan {

namespace {

using Numbers = LearnedOrder::Numbers;

Numbers united(const Numbers& some, const Numbers& others) {
  Numbers result;
  std::set_union(some.begin(), some.end(), others.begin(), others.end(), std::back_inserter(result));
  return result;
}

// Says for each entry whether it belongs to a backward: its first number has come before and does not come again.
std::vector<bool> in_backward(const std::vector<Numbers>& entries) {
  std::unordered_map<int32_t, size_t> left;
  for (const Numbers& entry : entries) ++left[entry.front()];
  const auto whole = left;
  std::vector<bool> result;
  for (const Numbers& entry : entries) {
    const size_t after = --left[entry.front()];
    result.push_back(after == 0 && whole.at(entry.front()) > 1);
  }
  return result;
}

}  // namespace

Numbers common(const Numbers& some, const Numbers& others) {
  Numbers result;
  std::set_intersection(some.begin(), some.end(), others.begin(), others.end(), std::back_inserter(result));
  return result;
}

Numbers without(const Numbers& some, const Numbers& others) {
  Numbers result;
  std::set_difference(some.begin(), some.end(), others.begin(), others.end(), std::back_inserter(result));
  return result;
}

std::optional<LearnedOrder> merged(const LearnedOrder& order, const LearnedOrder& run, bool shrinks) {
  const Numbers either = united(order.unseen, run.unseen);
  const auto& old = order.entries;
  const auto& now = run.entries;
  const std::vector<bool> old_backward = in_backward(old), now_backward = in_backward(now);
  // Between two entries that both have, nothing says which of these comes first. Modules are numbered in the order of
  // the forward, and backward goes the other way.
  const auto comes_first = [&](size_t i, size_t j) {
    if (old_backward[i] != now_backward[j]) return !old_backward[i];
    return (old[i].front() < now[j].front()) != old_backward[i];
  };
  LearnedOrder result{{}, common(order.unseen, run.unseen)};
  for (size_t i = 0, j = 0; i < old.size() || j < now.size();) {
    const Numbers mine = i < old.size() ? without(old[i], either) : Numbers{};
    const Numbers theirs = j < now.size() ? without(now[j], either) : Numbers{};
    const bool left_out = i < old.size() && mine.empty(), new_one = j < now.size() && theirs.empty();
    if (left_out && (!new_one || comes_first(i, j))) {
      result.entries.push_back(old[i++]);
    } else if (new_one) {
      result.entries.push_back(now[j++]);
    } else if (mine == theirs) {
      result.entries.push_back(united(old[i++], now[j++]));
    } else if (shrinks && i < old.size()) {
      ++i;
    } else {
      return {};
    }
  }
  return result;
}

}  // namespace ds::plan
