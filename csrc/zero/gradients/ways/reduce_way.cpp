#include "zero/gradients/ways/reduce_way.h"

#include <ATen/Functions.h>

#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ranges.h"

namespace ds::zero {

namespace {

// By order. Filled before main.
std::vector<ReduceWayRow>& rows() {
  static std::vector<ReduceWayRow> all;
  return all;
}

ReduceWayPtr make(const WayParts& parts, const BucketFacts& bucket, size_t row);

// The first way from row number `row` on that takes the bucket.
ReduceWayPtr make_first(const WayParts& parts, const BucketFacts& bucket, size_t row) {
  for (; row < rows().size(); ++row)
    if (rows()[row].takes(parts, bucket)) return make(parts, bucket, row);
  fail(ErrorKind::kRuntime, "no registered way reduces the gradient bucket from parameter \"", bucket.name, "\"");
}

ReduceWayPtr make(const WayParts& parts, const BucketFacts& bucket, size_t row) {
  return rows()[row].make(parts, [&] { return make_first(parts, bucket, row + 1); });
}

}  // namespace

ReduceWayRegistration::ReduceWayRegistration(ReduceWayRow row) {
  rows().push_back(std::move(row));
  std::stable_sort(rows().begin(), rows().end(),
                   [](const ReduceWayRow& a, const ReduceWayRow& b) { return a.order < b.order; });
}

at::Tensor row_to_receive(const WayParts& parts, const GradBucket& bucket, const at::Tensor& sent) {
  const ParamSpace& space = parts.space(bucket);
  const Buffer& grad = space.grad;
  const bool direct = grad.dtype == sent.scalar_type() || grad.dtype == at::kFloat;
  const at::ScalarType type = direct ? grad.dtype : sent.scalar_type();
  const bool here = sent.device() == parts.store.device();
  if (here && direct && !bucket.row_holds && grad.on_device()) return parts.store.grad_row_to_write(space, bucket.plan);
  return here ? parts.memory.borrow(bucket.row_numel(), type)
              : at::empty({bucket.row_numel()}, sent.options().dtype(type));
}

at::Tensor scattered_sum(const WayParts& parts, const BucketFacts& bucket, const at::Tensor& values) {
  const at::Tensor row = at::empty({bucket.row_numel()}, values.options());
  parts.ranks(bucket).shard->reduce_scatter(values, row, bucket.name)->wait();
  return row;
}

ReduceWayPtr way_of(const WayParts& parts, const BucketFacts& bucket) {
  const std::string& named = parts.ranks(bucket).axes.way;
  if (named.empty()) return make_first(parts, bucket, 0);
  std::string known;
  for (size_t row = 0; row < rows().size(); ++row) {
    if (rows()[row].name == named) return make(parts, bucket, row);
    known += (known.empty() ? "" : ", ") + rows()[row].name;
  }
  fail(ErrorKind::kValue, "'", named, "' is not a way to reduce gradients; the ways are: ", known);
}

}  // namespace ds::zero
