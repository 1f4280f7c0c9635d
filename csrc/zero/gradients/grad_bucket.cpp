#include "zero/gradients/grad_bucket.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "base/error.h"
#include "base/ranges.h"

namespace ds::zero {

namespace {

// The states that may follow each state, as bits.
constexpr unsigned bit(BucketState state) { return 1u << static_cast<unsigned>(state); }
constexpr std::array<unsigned, kBucketStates> kFollowers = {
    // kFilling: the next backward starts there, too. kArrived: one rank alone, whose bucket is its own sum.
    bit(BucketState::kFilling) | bit(BucketState::kLaunched) | bit(BucketState::kArrived) |
        bit(BucketState::kAbandoned),
    // kLaunched: buckets of touched rows have no received row.
    bit(BucketState::kReceived) | bit(BucketState::kLeaving) | bit(BucketState::kReduced) |
        bit(BucketState::kAbandoned),
    bit(BucketState::kReduced) | bit(BucketState::kAbandoned),                               // kReceived
    bit(BucketState::kReduced) | bit(BucketState::kAbandoned),                               // kLeaving
    bit(BucketState::kArrived) | bit(BucketState::kFilling) | bit(BucketState::kAbandoned),  // kReduced
    bit(BucketState::kFilling) | bit(BucketState::kAbandoned),                               // kArrived
    bit(BucketState::kFilling),                                                              // kAbandoned
};

std::vector<std::pair<int64_t, int64_t>> gaps_of(const plan::ShardMap& map, const BucketFacts& bucket) {
  std::vector<std::pair<int64_t, int64_t>> taken, gaps;
  for (size_t e = map.first[bucket.plan.first_param]; e < map.first[bucket.plan.last_param + 1]; ++e)
    taken.emplace_back(map.extents[e].full_offset - bucket.begin, map.extents[e].numel);
  sort(taken);
  taken.emplace_back(bucket.numel, 0);
  int64_t next = 0;
  for (const auto& [offset, numel] : taken) {
    if (offset > next) gaps.emplace_back(next, offset);
    next = offset + numel;
  }
  return gaps;
}

}  // namespace

const char* name_of(BucketState state) {
  constexpr std::array<const char*, kBucketStates> kNames = {"filling", "launched", "received", "leaving",
                                                             "reduced", "arrived",  "abandoned"};
  return kNames[static_cast<size_t>(state)];
}

bool may_follow(BucketState from, BucketState to) { return (kFollowers[static_cast<size_t>(from)] & bit(to)) != 0; }

void GradBucket::enter(BucketState next) {
  if (!may_follow(state_, next))
    fail(ErrorKind::kRuntime, "gradient bucket ", number, " of space ", space, " (from parameter \"", name,
         "\") cannot go from state ", name_of(state_), " to ", name_of(next));
  state_ = next;
}

std::vector<GradBucket> grad_buckets(const ParamStore& store) {
  std::vector<BucketFacts> buckets;
  for (size_t s = 0; s < store.spaces().size(); ++s) {
    const ParamSpace& space = store.spaces()[s];
    int32_t number = 0;
    for (const plan::Bucket& plan : space.map.buckets) {
      const int64_t begin = space.map.full_begin(plan);
      const std::vector<int32_t> params(space.params.begin() + plan.first_param,
                                        space.params.begin() + plan.last_param + 1);
      const ParamSpec& first = store.spec(params.front());
      const bool by_rows = space.in_place && first.form != GradForm::kDense;
      buckets.push_back({static_cast<int32_t>(s), number++, first.name, plan, begin, space.map.full_end(plan) - begin,
                         params, space.in_place, store.policy().shards_grads() && !space.in_place, by_rows});
      buckets.back().gaps = gaps_of(space.map, buckets.back());
    }
  }
  // A bucket is complete when its first parameter in the module has its gradient.
  const auto first_order = [&](const BucketFacts& bucket) {
    int32_t first = store.spec(bucket.params[0]).order;
    for (int32_t param : bucket.params) first = std::min(first, store.spec(param).order);
    return first;
  };
  std::stable_sort(buckets.begin(), buckets.end(),
                   [&](const BucketFacts& a, const BucketFacts& b) { return first_order(a) > first_order(b); });
  return {std::make_move_iterator(buckets.begin()), std::make_move_iterator(buckets.end())};
}

}  // namespace ds::zero
