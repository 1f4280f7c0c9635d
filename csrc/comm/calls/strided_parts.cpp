#include "comm/calls/strided_parts.h"

#include <ATen/Functions.h>

#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"

namespace ds::comm {

namespace {

using Views = StridedParts::Views;

std::vector<int64_t> counts_of(const Views& views) {
  std::vector<int64_t> counts;
  for (const auto& of_rank : views) {
    counts.push_back(0);
    for (const StridedView& view : of_rank) counts.back() += view.numel();
  }
  return counts;
}

std::vector<c10::SmallVector<StridedRows, 3>> rows_of_views(const Views& views) {
  std::vector<c10::SmallVector<StridedRows, 3>> rows(views.size());
  for (size_t rank = 0; rank < views.size(); ++rank)
    for (const StridedView& view : views[rank]) rows[rank].emplace_back(view);
  return rows;
}

template <typename Copy>
void over_flat(const Views& views, const at::Tensor& flat, const Copy& copy) {
  int64_t begin = 0;
  for (const auto& of_rank : views)
    for (const StridedView& view : of_rank) {
      copy(view.tensor(), flat.narrow(0, begin, view.numel()).view(view.sizes));
      begin += view.numel();
    }
}

}  // namespace

StridedView::StridedView(const at::Tensor& whole)
    : of(whole),
      sizes(whole.sizes().begin(), whole.sizes().end()),
      strides(whole.strides().begin(), whole.strides().end()),
      offset(whole.storage_offset()) {}

int64_t StridedView::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

at::Tensor StridedView::tensor() const { return of.as_strided(sizes, strides, offset); }

StridedParts::StridedParts(Views give, Views take)
    : give_(std::move(give)), take_(std::move(take)), give_counts_(counts_of(give_)), take_counts_(counts_of(take_)) {
  for (const Views* views : {&give_, &take_})
    for (const auto& of_rank : *views)
      for (const StridedView& view : of_rank) {
        if (!some_.defined() || (some_.numel() == 0 && view.of.device() == some_.device())) some_ = view.of;
        if (view.of.scalar_type() != some_.scalar_type() || view.of.device() != some_.device())
          fail(ErrorKind::kType, "tensors of one exchange are ", c10::toString(some_.scalar_type()), " on ",
               some_.device().str(), " and ", c10::toString(view.of.scalar_type()), " on ", view.of.device().str(),
               ": make them one dtype on one device");
      }
  if (!some_.defined()) fail(ErrorKind::kValue, "an exchange without tensors");
  if (give_.size() != take_.size())
    fail(ErrorKind::kValue, "an exchange gives to ", give_.size(), " ranks and takes from ", take_.size());
}

RowsOfRanks StridedParts::rows() const { return {rows_of_views(give_), rows_of_views(take_)}; }

void StridedParts::pack(const at::Tensor& flat) const {
  over_flat(give_, flat, [](const at::Tensor& view, const at::Tensor& part) { part.copy_(view); });
}

void StridedParts::unpack(const at::Tensor& flat) const {
  over_flat(take_, flat, [](const at::Tensor& view, const at::Tensor& part) { view.copy_(part); });
}

Op strided_all_to_all(const std::shared_ptr<const StridedParts>& parts, const std::string& tag, bool detached) {
  const auto placeholder = [&](const std::vector<int64_t>& counts) {
    return parts->some().as_strided({sum_of(counts)}, {0});
  };
  Op op;
  op.verb = Verb::kAllToAll;
  op.in = placeholder(parts->give_counts());
  op.out = placeholder(parts->take_counts());
  op.in_counts = parts->give_counts();
  op.out_counts = parts->take_counts();
  op.tag = tag;
  if (detached) op.wait = Wait::kDetached;
  op.parts = parts;
  return op;
}

}  // namespace ds::comm
