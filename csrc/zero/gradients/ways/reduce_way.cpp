#include "zero/gradients/ways/reduce_way.h"

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

}  // namespace

ReduceWayRegistration::ReduceWayRegistration(ReduceWayRow row) {
  rows().push_back(std::move(row));
  std::stable_sort(rows().begin(), rows().end(),
                   [](const ReduceWayRow& a, const ReduceWayRow& b) { return a.order < b.order; });
}

ReduceWayPtr ReduceWays::of(const BucketFacts& bucket) {
  const std::string& named = parts_.ranks(bucket).way;
  if (named.empty()) return make(bucket, 0, "");
  for (size_t row = 0; row < rows().size(); ++row)
    if (rows()[row].name == named) return make_row(bucket, row, "");
  std::string known;
  for (const ReduceWayRow& row : rows()) known += (known.empty() ? "" : ", ") + row.name;
  fail(ErrorKind::kValue, "there is no way '", named, "' to reduce gradients; there are: ", known);
}

ReduceWayPtr ReduceWays::make(const BucketFacts& bucket, size_t from, const std::string& outside) {
  for (size_t row = from; row < rows().size(); ++row)
    if (rows()[row].takes(parts_, bucket)) return make_row(bucket, row, outside);
  fail(ErrorKind::kRuntime, "no registered way reduces the gradient bucket from parameter \"", bucket.name, "\"");
}

ReduceWayPtr ReduceWays::make_row(const BucketFacts& bucket, size_t row, const std::string& outside) {
  const std::string name = outside + rows()[row].name;
  std::string inside;  // the parts of a way depend on the bucket, so its name does, too
  for (size_t next = row + 1; next < rows().size(); ++next)
    if (rows()[next].takes(parts_, bucket)) inside += " around " + rows()[next].name;
  ReduceWayPtr& way = made_[name + inside];
  if (!way) way = rows()[row].make(parts_, [&] { return make(bucket, row + 1, name + " around "); });
  return way;
}

}  // namespace ds::zero
