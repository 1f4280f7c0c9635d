#include "zero/group_cut.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>

namespace ds::zero {

namespace {

int64_t total(const std::vector<int64_t>& numels) { return std::accumulate(numels.begin(), numels.end(), int64_t{0}); }

}  // namespace

GroupCut::GroupCut(const ParamStore& store, StateAccess& states, int32_t group) : store_(store), states_(states) {
  const comm::Communicator& ranks = *store.everyone().shard;
  while (first_ < store.size() && store.spec(first_).group < group) ++first_;
  last_ = first_;
  starts_ = {0};
  while (last_ < store.size() && store.spec(last_).group == group)
    starts_.push_back(starts_.back() + store.place(last_++).numel);
  size_ = (starts_.back() + 2 * ranks.size() - 1) / (2 * ranks.size()) * 2;
  owned_ = std::clamp<int64_t>(starts_.back() - ranks.rank() * size_, 0, size_);

  std::vector<plan::OwnedRun> runs;
  const std::vector<Piece>& pieces = store.pieces();
  at::ScalarType type = at::kFloat;
  size_t piece = 0;
  for (size_t param = first_; param < last_; ++param) {
    while (piece < pieces.size() && pieces[piece].param < static_cast<int64_t>(param)) ++piece;
    const ParamSpace& space = store.space_of(param);
    if (space.key.dtype == at::kDouble) type = at::kDouble;
    const auto index = static_cast<size_t>(store.place(param).index);
    for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
      const plan::Extent& extent = space.map.extents[e];
      runs.push_back(
          {starts_[param - first_] + extent.param_offset, extent.numel, extent.rank, static_cast<int64_t>(piece), 0});
      if (extent.rank == space.rank()) ++piece;
    }
  }
  options_ = at::TensorOptions().device(store.device()).dtype(type);
  plan_ = plan::repartition(runs, size_, ranks.size(), ranks.rank());
}

// Files have the order of rows; pieces of parameters with other strides that of memory.
bool GroupCut::in_file_order(size_t param) const { return store_.spec(param).tensor.is_contiguous(); }

at::Tensor GroupCut::partition(const std::vector<at::Tensor>& pieces) const {
  at::NoGradGuard no_grad;
  const at::Tensor made = at::zeros({size_}, options_);
  if (size_ == 0) return made.cpu();  // nobody has anything to give
  const at::Tensor given = at::empty({total(plan_.give_numels)}, options_);
  int64_t at = 0;
  for (const plan::Give& give : plan_.give) {
    const at::Tensor to = given.narrow(0, at, give.numel);
    const at::Tensor& piece = pieces.at(give.piece);
    if (piece.defined()) {
      to.copy_(piece.reshape({-1}).narrow(0, give.offset, give.numel));
    } else {
      to.zero_();
    }
    at += give.numel;
  }
  comm::Communicator& ranks = *store_.everyone().shard;
  at::Tensor taken = given;
  if (ranks.size() > 1) {
    taken = at::empty({total(plan_.take_numels)}, options_);
    ranks.all_to_all(given, plan_.give_numels, taken, plan_.take_numels, "a partition of a checkpoint")->wait();
  }
  at = 0;
  for (const plan::Take& take : plan_.take) {
    made.narrow(0, take.at, take.numel).copy_(taken.narrow(0, at, take.numel));
    at += take.numel;
  }
  const std::vector<Slice> own = slices();
  for (size_t param = first_; param < last_; ++param) {
    if (in_file_order(param)) continue;
    const at::Tensor whole = states_.full_of(pieces, param);  // every rank takes part, whoever needs it
    for (const Slice& slice : own)
      if (slice.param == param && whole.defined())
        made.narrow(0, slice.at, slice.numel).copy_(whole.reshape({-1}).narrow(0, slice.offset, slice.numel));
  }
  return made.cpu();
}

std::optional<std::vector<GroupCut::Part>> GroupCut::in_pieces(const std::vector<at::Tensor>& pieces,
                                                               int64_t numel) const {
  if (store_.everyone().shard->size() != 1) return std::nullopt;
  for (size_t param = first_; param < last_; ++param)
    if (!in_file_order(param) || store_.spec(param).tensor.scalar_type() == at::kDouble) return std::nullopt;
  std::vector<Part> parts;
  for (size_t p = 0; p < store_.pieces().size(); ++p) {
    const Piece& piece = store_.pieces()[p];
    const auto param = static_cast<size_t>(piece.param);
    if (param < first_ || param >= last_ || !pieces.at(p).defined()) continue;
    const at::Tensor& tensor = pieces[p];
    if (tensor.scalar_type() != at::kFloat || !tensor.is_contiguous() || tensor.numel() != piece.numel)
      return std::nullopt;
    const int64_t at = starts_[param - first_] + piece.param_offset;
    if (at < numel)
      parts.emplace_back(at, tensor.detach().reshape({-1}).narrow(0, 0, std::min(piece.numel, numel - at)));
  }
  return parts;
}

std::vector<GroupCut::Slice> GroupCut::slices() const {
  const int64_t begin = store_.everyone().shard->rank() * size_;
  std::vector<Slice> found;
  for (size_t param = first_; param < last_; ++param) {
    const int64_t from = starts_[param - first_], to = starts_[param - first_ + 1];
    const int64_t low = std::max(begin, from), high = std::min(begin + size_, to);
    if (low < high) found.push_back({param, low - begin, high - low, low - from});
  }
  return found;
}

}  // namespace ds::zero
