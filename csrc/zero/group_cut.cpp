#include "zero/group_cut.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <numeric>

namespace ds::zero {

namespace {

int64_t total(const std::vector<int64_t>& numels) { return std::accumulate(numels.begin(), numels.end(), int64_t{0}); }

}  // namespace

GroupCut::GroupCut(const ParamStore& store, int32_t group, int64_t size) : size_(size) {
  std::vector<plan::OwnedRun> runs;
  int64_t start = 0, piece = 0;
  int64_t parts = 1, rank = 0;
  at::ScalarType type = at::kFloat;
  const std::vector<Piece>& pieces = store.pieces();
  for (size_t param = 0; param < store.size(); ++param) {
    while (piece < static_cast<int64_t>(pieces.size()) && pieces[piece].param < static_cast<int64_t>(param)) ++piece;
    if (store.spec(param).group != group) continue;
    const ParamSpace& space = store.space_of(param);
    parts = space.map.parts;
    rank = space.rank();
    if (space.key.dtype == at::kDouble) type = at::kDouble;
    const auto index = static_cast<size_t>(store.place(param).index);
    for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
      const plan::Extent& extent = space.map.extents[e];
      runs.push_back({start + extent.param_offset, extent.numel, extent.rank, piece, 0});
      if (extent.rank == rank) ++piece;
    }
    start += store.place(param).numel;
  }
  options_ = at::TensorOptions().device(store.device()).dtype(type);
  plan_ = plan::repartition(runs, size, static_cast<int32_t>(parts), static_cast<int32_t>(rank));
}

at::Tensor GroupCut::pack(const std::vector<at::Tensor>& pieces) const {
  at::NoGradGuard no_grad;
  const at::Tensor packed = at::empty({total(plan_.give_numels)}, options_);
  int64_t at = 0;
  for (const plan::Give& give : plan_.give) {
    const at::Tensor to = packed.narrow(0, at, give.numel);
    const at::Tensor& piece = pieces.at(give.piece);
    if (piece.defined()) {
      to.copy_(piece.reshape({-1}).narrow(0, give.offset, give.numel));
    } else {
      to.zero_();
    }
    at += give.numel;
  }
  return packed;
}

at::Tensor GroupCut::unpack(const at::Tensor& taken) const {
  at::NoGradGuard no_grad;
  const at::Tensor partition = at::zeros({size_}, options_);
  int64_t at = 0;
  for (const plan::Take& take : plan_.take) {
    partition.narrow(0, take.at, take.numel).copy_(taken.narrow(0, at, take.numel));
    at += take.numel;
  }
  return partition;
}

}  // namespace ds::zero
