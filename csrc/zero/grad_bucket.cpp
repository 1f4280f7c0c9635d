#include "zero/grad_bucket.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace ds::zero {

namespace {

std::vector<std::pair<int64_t, int64_t>> gaps_of(const plan::ShardMap& map, const GradBucket& bucket) {
  std::vector<std::pair<int64_t, int64_t>> taken, gaps;
  for (size_t e = map.first[bucket.plan.first_param]; e < map.first[bucket.plan.last_param + 1]; ++e)
    taken.emplace_back(map.extents[e].full_offset - bucket.begin, map.extents[e].numel);
  std::sort(taken.begin(), taken.end());
  taken.emplace_back(bucket.numel, 0);
  int64_t next = 0;
  for (const auto& [offset, numel] : taken) {
    if (offset > next) gaps.emplace_back(next, offset);
    next = offset + numel;
  }
  return gaps;
}

}  // namespace

void GradBucket::zero_gaps() const {
  constexpr size_t kFew = 8;  // more of them cost more than all of the slots
  if (gaps.size() > kFew) {
    slots.zero_();
    return;
  }
  for (const auto& [from, to] : gaps) slots.narrow(0, from, to - from).zero_();
}

std::vector<GradBucket> grad_buckets(const ParamStore& store) {
  std::vector<GradBucket> buckets;
  for (size_t s = 0; s < store.spaces().size(); ++s) {
    const ParamSpace& space = store.spaces()[s];
    for (const plan::Bucket& plan : space.map.buckets) {
      const int64_t begin = space.map.full_begin(plan);
      const std::vector<int32_t> params(space.params.begin() + plan.first_param,
                                        space.params.begin() + plan.last_param + 1);
      const bool by_rows = space.in_place && store.spec(params.front()).form != GradForm::kDense;
      buckets.push_back({static_cast<int32_t>(s), plan, begin, space.map.full_end(plan) - begin, params, space.in_place,
                         store.policy().shards_grads() && !space.in_place, by_rows});
      buckets.back().gaps = gaps_of(space.map, buckets.back());
    }
  }
  // A bucket is complete when its first parameter in the module has its gradient.
  const auto first_order = [&](const GradBucket& bucket) {
    int32_t first = store.spec(bucket.params[0]).order;
    for (int32_t param : bucket.params) first = std::min(first, store.spec(param).order);
    return first;
  };
  std::stable_sort(buckets.begin(), buckets.end(),
                   [&](const GradBucket& a, const GradBucket& b) { return first_order(a) > first_order(b); });
  return buckets;
}

}  // namespace ds::zero
