// Plain loops of sums of squares.
#include <algorithm>
#include <cmath>

#include "kernels/ref/element.h"
#include "kernels/ref/ref.h"
#include "kernels/sum_order.h"

namespace ds::kernels::ref {

// [Note: order of the sum of squares] in kernels/sum_order.h, followed to the letter.
void sum_squares(const Launch&, const Segment* segments, size_t count, DType dtype, double* sum) {
  double block_lanes[kSumBlockLanes] = {};
  size_t block = 0;
  for (size_t s = 0; s < count; ++s) {
    for (size_t begin = 0; begin < segments[s].numel; begin += kSumBlock) {
      const size_t end = std::min(segments[s].numel, begin + kSumBlock);
      double lanes[kSumLanes] = {};
      for (size_t i = begin; i < end; ++i) {
        const double x = load(segments[s].data, dtype, i);
        lanes[(i - begin) % kSumLanes] += x * x;
      }
      block_lanes[block++ % kSumBlockLanes] += sum_of_lanes(lanes);
    }
  }
  *sum += sum_of_lanes(block_lanes);
}

void finish_norm(const Launch&, const double* sum, const double* failed, float loss_scale, float max_norm, bool check,
                 StepScale* out) {
  const double norm = std::sqrt(*sum) / loss_scale;
  double factor = 1.0 / loss_scale;
  if (max_norm > 0) {
    const double clip = max_norm / (norm + 1e-6);
    if (!(clip >= 1)) factor *= clip;  // a nan norm makes a nan factor
  }
  out->norm = norm;
  out->grad_scale = static_cast<float>(factor);
  out->skip = check && !std::isfinite(norm) ? kSkipNotFinite : 0;
  if (failed != nullptr && *failed != 0) out->skip = kSkipFailed;
}

void find_nonfinite(const Launch&, const Checked* arrays, size_t count, DType dtype) {
  for (size_t a = 0; a < count; ++a) {
    for (size_t i = 0; i < arrays[a].numel; ++i) {
      const double x = load(arrays[a].data, dtype, i);
      *arrays[a].found |= (std::isnan(x) ? kFoundNan : 0) | (std::isinf(x) ? kFoundInf : 0);
    }
  }
}

}  // namespace ds::kernels::ref
