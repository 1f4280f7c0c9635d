#include "zero/step/parameter_sums.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace ds::zero {

void ParameterSums::set_rules(const std::vector<const optim::Rule*>& rules) {
  width_ = 0;
  kept_.clear();
  rows_ = at::Tensor();
  for (const optim::Rule* rule : rules) {
    width_ = std::max<int64_t>(width_, rule->sums);
    if (!rule->kept.empty()) kept_ = rule->kept;  // all groups have one rule then
  }
}

void ParameterSums::begin() {
  if (width_ == 0) return;
  if (!kept_.empty() && rows_.defined()) {
    rows_.narrow(1, 0, width_ - static_cast<int64_t>(kept_.size())).zero_();
    return;
  }
  rows_ = at::zeros({static_cast<int64_t>(store_.size()), width_},
                    at::TensorOptions().device(store_.device()).dtype(at::kDouble));
  for (size_t i = 0; i < kept_.size(); ++i) column(i).fill_(kept_[i].second);
}

at::Tensor ParameterSums::column(size_t kept) const {
  return rows_.select(1, width_ - static_cast<int64_t>(kept_.size() - kept));
}

void ParameterSums::add_up() {
  rows_of_sets_.resize(store_.sets().size());
  for (size_t number = 0; number < store_.sets().size(); ++number) {
    const SpaceSet& set = store_.sets()[number];
    if (set.ranks.shard->size() == 1 || set.params.empty()) continue;
    if (set.params.size() == store_.size()) {
      set.ranks.shard->all_reduce(rows_, comm::ReduceOp::kSum, "sums over parameters")->wait();
      continue;
    }
    at::Tensor& rows = rows_of_sets_[number];
    if (!rows.defined())
      rows = at::tensor(std::vector<int64_t>(set.params.begin(), set.params.end()), at::kLong).to(rows_.device());
    const at::Tensor own = rows_.index_select(0, rows);
    set.ranks.shard->all_reduce(own, comm::ReduceOp::kSum, "sums over parameters")->wait();
    rows_.index_copy_(0, rows, own);
  }
}

NamedNumbers ParameterSums::kept() const {
  NamedNumbers found;
  const bool known = rows_.defined() && !rows_.is_meta();  // not in a step that is planned
  for (size_t i = 0; known && i < kept_.size(); ++i) {
    const at::Tensor own = column(i).to(at::kCPU).contiguous();
    found[kept_[i].first].assign(own.data_ptr<double>(), own.data_ptr<double>() + own.numel());
  }
  return found;
}

void ParameterSums::restore(const NamedNumbers& numbers) {
  if (kept_.empty()) return;
  rows_ = at::Tensor();
  begin();
  for (size_t i = 0; i < kept_.size(); ++i)
    if (const auto found = numbers.find(kept_[i].first);
        found != numbers.end() && found->second.size() == store_.size())
      column(i).copy_(at::tensor(found->second, at::kDouble));
}

}  // namespace ds::zero
