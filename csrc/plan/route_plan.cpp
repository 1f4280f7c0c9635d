#include "plan/route_plan.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/sizes.h"

namespace ds::plan {

namespace {

std::vector<int64_t> starts_of(const std::vector<int64_t>& kept, int64_t capacity) {
  std::vector<int64_t> starts(kept.size() + 1);
  for (size_t e = 0; e < kept.size(); ++e) starts[e + 1] = starts[e] + (capacity < 0 ? kept[e] : capacity);
  return starts;
}

void check_expert(int32_t expert, size_t assignment, const RouteRules& rules) {
  if (expert >= kUnrouted && expert < rules.experts) return;
  const auto token = static_cast<int64_t>(assignment) / rules.k;
  if (expert == kNotANumber) fail(ErrorKind::kValue, "the logits of token ", token, " are not numbers (nan)");
  fail(ErrorKind::kValue, "token ", token, " chose expert ", expert, "; there are ", rules.experts);
}

// Marks in `stays` the `capacity` assignments of `all`, which are in their order, that have the largest priority.
void choose(std::vector<int32_t> all, int64_t capacity, const float* priority, std::vector<char>& stays) {
  std::vector<int32_t> order(all.size());  // of equal priorities the first ones stay
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int32_t a, int32_t b) {
    const float x = priority[all[a]], y = priority[all[b]];
    return x != y ? x > y : a < b;
  };
  std::nth_element(order.begin(), order.begin() + capacity, order.end(), before);
  for (int64_t i = 0; i < capacity; ++i) stays[all[order[i]]] = 1;
}

}  // namespace

RoutePlan plan_routes(const int32_t* experts, size_t n, const RouteRules& rules, const float* priority) {
  if (rules.experts < 1 || rules.k < 1 || n % rules.k != 0)
    fail(ErrorKind::kValue, "a plan of routes takes at least one expert and k choices of each token, got ",
         rules.experts, " experts, k = ", rules.k, ", ", n, " choices");
  RoutePlan plan;
  plan.wanted.assign(rules.experts, 0);
  plan.kept.assign(rules.experts, 0);
  plan.location.assign(n, -1);
  for (size_t a = 0; a < n; ++a) {
    check_expert(experts[a], a, rules);
    if (experts[a] != kUnrouted) ++plan.wanted[experts[a]];
  }
  const size_t k = rules.k, tokens = n / k;
  const auto each_in_order = [&](const auto& visit) {
    for (size_t i = 0; i < n; ++i) visit(rules.choices_first ? i % tokens * k + i / tokens : i);
  };
  std::vector<char> stays;  // for experts that have to choose
  if (priority != nullptr && rules.capacity >= 0) {
    stays.assign(n, 0);
    std::vector<std::vector<int32_t>> of_expert(rules.experts);
    each_in_order([&](size_t a) {
      if (experts[a] == kUnrouted) return;
      if (plan.wanted[experts[a]] > rules.capacity) of_expert[experts[a]].push_back(static_cast<int32_t>(a));
      stays[a] = plan.wanted[experts[a]] <= rules.capacity;
    });
    for (std::vector<int32_t>& all : of_expert)
      if (!all.empty()) choose(std::move(all), rules.capacity, priority, stays);
  }
  each_in_order([&](size_t a) {
    const int32_t e = experts[a];
    if (e == kUnrouted || (!stays.empty() && !stays[a])) return;
    if (rules.capacity >= 0 && plan.kept[e] >= rules.capacity) return;
    plan.location[a] = static_cast<int32_t>(plan.kept[e]++);
  });
  return plan;
}

std::vector<int32_t> RoutePlan::slots(const int32_t* experts, int64_t capacity) const {
  const std::vector<int64_t> starts = starts_of(kept, capacity);
  std::vector<int32_t> out(location.size(), -1);
  for (size_t a = 0; a < out.size(); ++a)
    if (location[a] >= 0) out[a] = static_cast<int32_t>(starts[experts[a]] + location[a]);
  return out;
}

std::vector<int32_t> RoutePlan::sources(const int32_t* experts, int64_t capacity) const {
  const std::vector<int64_t> starts = starts_of(kept, capacity);
  std::vector<int32_t> out(starts.back(), -1);
  for (size_t a = 0; a < location.size(); ++a)
    if (location[a] >= 0) out[starts[experts[a]] + location[a]] = static_cast<int32_t>(a);
  return out;
}

ArrivalPlan plan_arrivals(const std::vector<int64_t>& counts, int64_t ranks, int64_t experts) {
  if (static_cast<int64_t>(counts.size()) != sizes::product("ranks x experts", ranks, experts))
    fail(ErrorKind::kValue, "a plan of arrivals takes ", ranks, " x ", experts, " counts, got ", counts.size());
  ArrivalPlan plan;
  plan.from_rank.assign(ranks, 0);
  plan.of_expert.assign(experts, 0);
  std::vector<int64_t> start(counts.size() + 1);  // of each run, as they come
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] < 0) fail(ErrorKind::kValue, "rank ", i / experts, " announced ", counts[i], " rows");
    start[i + 1] = start[i] + counts[i];
    plan.from_rank[i / experts] += counts[i];
    plan.of_expert[i % experts] += counts[i];
  }
  plan.order.reserve(start.back());
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t r = 0; r < ranks; ++r)
      for (int64_t i = start[r * experts + e]; i < start[r * experts + e + 1]; ++i)
        plan.order.push_back(static_cast<int32_t>(i));
  return plan;
}

}  // namespace ds::plan
