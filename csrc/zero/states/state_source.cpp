#include "zero/states/state_source.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>

#include "zero/step/leased_row.h"

namespace ds::zero {

namespace {

void take_zeros(int64_t numel, const io::TakePiece& take) {
  constexpr int64_t kSome = 4096;
  static const float zeros[kSome] = {};
  for (; numel > 0; numel -= kSome) take(zeros, static_cast<uint64_t>(std::min(numel, kSome)) * sizeof(float));
}

}  // namespace

void StateSource::walk(int64_t begin, int64_t end, const io::TakePiece& take) const {
  at::NoGradGuard no_grad;
  storage::Lease row;
  plan::Range held{0, 0};  // of the plane
  int32_t plane = -1;
  int64_t at = begin;
  for (const Run& run : runs_) {
    const int64_t first = std::max(begin, run.at), last = std::min(end, run.at + run.piece.numel);
    if (first >= last) continue;
    take_zeros(first - at, take);
    const ParamSpace& space = store_.spaces()[run.piece.space];
    const plan::Extent& extent = space.map.extents[run.piece.extent];
    const plan::Range wanted = space.row_in(run.buffer, space.map.buckets[space.map.bucket_of[extent.param]]);
    if (plane != run.buffer.plane.number || held.begin != wanted.begin) {
      row.release();
      row = store_.lease(run.buffer, wanted, storage::Access::kRead);
      held = wanted;
      plane = run.buffer.plane.number;
    }
    const int64_t from = space.offset_in(run.buffer, extent) - held.begin + first - run.at;
    const at::Tensor part = row.data().narrow(0, from, last - first).to(at::kCPU, at::kFloat).contiguous();
    take(part.data_ptr(), static_cast<uint64_t>(last - first) * sizeof(float));
    at = last;
  }
  take_zeros(end - at, take);
}

void StateSource::each(io::Staging&, const io::TakePiece& take) const { walk(0, numel_, take); }

void StateSource::copy_range(char* to, uint64_t begin, uint64_t end) const {
  constexpr uint64_t kWidth = sizeof(float);
  uint64_t at = begin / kWidth * kWidth;  // whole elements, of which the first and the last may be wanted in part
  walk(static_cast<int64_t>(begin / kWidth), static_cast<int64_t>((end + kWidth - 1) / kWidth),
       [&](const void* data, uint64_t bytes) {
         const uint64_t first = std::max(begin, at), last = std::min(end, at + bytes);
         if (first < last) std::memcpy(to + first - begin, static_cast<const char*>(data) + first - at, last - first);
         at += bytes;
       });
}

}  // namespace ds::zero
