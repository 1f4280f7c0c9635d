#include "zero/step/norm_sums.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <utility>

#include "base/ranges.h"

namespace ds::zero {

NormSums::NormSums(const ParamStore& store, at::Tensor total)
    : total_(std::move(total)), others_(at::zeros({static_cast<int64_t>(store.spaces().size())}, total_.options())) {
  add_lists(store.everyone().norm_over, total_);
  for (const ParamSpace& space : store.spaces()) {
    const std::vector<NormRanks>& over = space.ranks().norm_over;
    const bool counts = all_of(over, [](const NormRanks& one) { return one.first; });
    const auto number = static_cast<int64_t>(of_space_.size());
    of_space_.push_back(counts ? add_lists(over, others_.narrow(0, number, 1)) : at::Tensor());
  }
  if (all_of(lists_, [](const Lists& one) { return one.joining.empty(); })) others_ = at::Tensor();
  std::stable_sort(lists_.begin(), lists_.end(),
                   [](const Lists& a, const Lists& b) { return a.over.size() > b.over.size(); });
}

// Returns where a sum with these lists is: in `sum`, or in that of an earlier space with the same.
at::Tensor NormSums::add_lists(std::vector<NormRanks> over, const at::Tensor& sum) {
  erase_if(over, [](const NormRanks& one) { return one.ranks->size() == 1; });
  for (bool whole = true;; whole = false) {
    const auto same = find_if(lists_, [&](const Lists& one) { return one.over == over; });
    if (same != lists_.end()) {
      // That sum is first added up over longer lists; this one joins it after their calls.
      const bool comes =
          any_of(lists_, [&](const Lists& one) { return one.over.size() > over.size() && one.sum.is_same(same->sum); });
      if (whole && !comes) return same->sum.narrow(0, 0, 1);
      same->joining.push_back(sum);
      return sum;
    }
    lists_.push_back({over, sum});
    if (over.empty()) return sum.narrow(0, 0, 1);
    over.erase(over.begin());
  }
}

void NormSums::clear() {
  total_.zero_();
  if (others_.defined()) others_.zero_();
}

at::Tensor NormSums::of(size_t space) const { return of_space_[space]; }

void NormSums::mean_over(comm::Communicator& ranks, const char* tag) const {
  if (ranks.size() == 1) return;
  for (const at::Tensor& sums : {total_.narrow(0, 0, 1), others_}) {
    if (!sums.defined()) continue;
    ranks.all_reduce(sums, comm::ReduceOp::kSum, tag)->wait();
    sums.div_(ranks.size());
  }
}

void NormSums::add_up(const char* tag) const {
  for (const Lists& one : lists_) {
    for (const at::Tensor& sum : one.joining) one.sum.narrow(0, 0, 1).add_(sum);
    if (!one.over.empty()) one.over.front().ranks->all_reduce(one.sum, comm::ReduceOp::kSum, tag)->wait();
  }
}

}  // namespace ds::zero
