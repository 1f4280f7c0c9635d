// The routes of a mixture of experts, as integers: tokens choose experts, experts keep some of what chose
// them, ranks exchange what experts of theirs have kept.
//
// An *assignment* is one choice of one token: number token * k + choice. A *row* is a kept assignment's copy of its
// token. Rows lie expert by expert, either without gaps (*compact*) or with `capacity` slots for each expert
// (*padded*); inside an expert in the order in which the assignments came.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ds::plan {

// Values that stand for no expert.
constexpr int32_t kUnrouted = -1;    // this token goes nowhere
constexpr int32_t kNotANumber = -2;  // its logits are no numbers: a plan refuses it

struct RouteRules {
  int64_t experts = 1, k = 1;
  int64_t capacity = -1;       // rows that an expert keeps at most; -1: all
  bool choices_first = false;  // first choices of all tokens come before second ones; else token by token
};

struct RoutePlan {
  std::vector<int64_t> wanted, kept;  // rows of each expert: before dropping, and after
  std::vector<int32_t> location;      // of each assignment among the rows of its expert; -1: dropped or unrouted

  // The row of each assignment, -1 for none; the assignment of each row, -1 for an empty one.
  // `capacity` -1: compact.
  std::vector<int32_t> slots(const int32_t* experts, int64_t capacity) const;
  std::vector<int32_t> sources(const int32_t* experts, int64_t capacity) const;
};

// `experts`: the choice of each of n assignments. Where more want an expert than it keeps, those with the largest
// `priority` stay, of equal ones those that come first; null: those that come first. Fails for a number that is no
// expert's and names the token.
RoutePlan plan_routes(const int32_t* experts, size_t n, const RouteRules& rules, const float* priority);

// Rows as they come from other ranks: of rank 0 expert by expert, then of rank 1...
struct ArrivalPlan {
  std::vector<int64_t> from_rank, of_expert;  // rows
  std::vector<int32_t> order;                 // row r, expert by expert and in them rank by rank, came as order[r]
};
// counts[rank * experts + expert]. Fails for a negative one.
ArrivalPlan plan_arrivals(const std::vector<int64_t>& counts, int64_t ranks, int64_t experts);

}  // namespace ds::plan
