#include "plan/bucket_plan.h"

#include "base/error.h"

namespace ds::plan {

std::vector<Bucket> bucket_plan(const FlatLayout& layout, int64_t max_numel) {
  if (max_numel <= 0) fail(ErrorKind::kValue, "reduce_bucket_size must be positive, got ", max_numel);
  std::vector<Bucket> buckets;
  const auto count = static_cast<int32_t>(layout.numels.size());
  int64_t end = layout.total_numel;
  for (int32_t param = count - 1; param >= 0; --param) {
    const int64_t begin = param == 0 ? 0 : layout.offsets[param];
    if (buckets.empty() || buckets.back().end - begin > max_numel) {
      buckets.push_back({param, param, begin, end});
    } else {
      buckets.back().first_param = param;
      buckets.back().begin = begin;
    }
    end = begin;
  }
  return buckets;
}

}  // namespace ds::plan
