// The loops of kernels/stream.h for each instruction set.
#include "kernels/stream.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/stream.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {
using namespace hwy::HWY_NAMESPACE;

// The last few elements do not matter here and are left out.
template <int kUpdates, bool kWrite>
void stream_loop(const Stream& s, size_t begin, size_t end) {
  const ScalableTag<float> d;
  const size_t lanes = Lanes(d);
  const auto keep = Set(d, 0.999f);
  for (size_t i = begin; i + lanes <= end; i += lanes) {
    const auto x = LoadU(d, s.read + i);
    for (int k = 0; k < kUpdates; ++k) StoreU(MulAdd(keep, LoadU(d, s.update[k] + i), x), d, s.update[k] + i);
    if constexpr (kWrite) StoreU(x, d, s.write + i);
  }
}

float stream_range(const Stream& s, size_t begin, size_t end) {
  const ScalableTag<float> d;
  const size_t lanes = Lanes(d);
  if (s.update[0] == nullptr && s.write == nullptr) {
    auto a = Zero(d), b = a, c = a, e = a;  // four sums hide the latency of the addition
    for (size_t i = begin; i + 4 * lanes <= end; i += 4 * lanes) {
      a = Add(a, LoadU(d, s.read + i));
      b = Add(b, LoadU(d, s.read + i + lanes));
      c = Add(c, LoadU(d, s.read + i + 2 * lanes));
      e = Add(e, LoadU(d, s.read + i + 3 * lanes));
    }
    return GetLane(SumOfLanes(d, Add(Add(a, b), Add(c, e))));
  }
  const int updates = (s.update[0] != nullptr) + (s.update[1] != nullptr) + (s.update[2] != nullptr);
  switch (2 * updates + (s.write != nullptr)) {
    case 1: stream_loop<0, true>(s, begin, end); break;
    case 2: stream_loop<1, false>(s, begin, end); break;
    case 3: stream_loop<1, true>(s, begin, end); break;
    case 4: stream_loop<2, false>(s, begin, end); break;
    case 5: stream_loop<2, true>(s, begin, end); break;
    case 6: stream_loop<3, false>(s, begin, end); break;
    default: stream_loop<3, true>(s, begin, end); break;
  }
  return 0;
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <atomic>

#include "kernels/cpu/split.h"

namespace ds::kernels::cpu {
namespace {

// The body for the widest instruction set of this CPU.
auto widest_body() {
  auto best = DS_BODY(stream_range, Isa::kScalar);
  for (int i = 0; i < kIsaCount; ++i)
    if (DS_BODY(stream_range, i) != nullptr && cpu_has(static_cast<Isa>(i))) best = DS_BODY(stream_range, i);
  return best;
}

}  // namespace
}  // namespace ds::kernels::cpu

float ds_cpu_stream(const ds::kernels::Launch& launch, const ds::kernels::Stream* streams, size_t count) {
  using namespace ds::kernels::cpu;
  const auto body = widest_body();
  std::atomic<float> sum{0};
  split_segments(launch, streams, count, [&](size_t s, size_t begin, size_t end) {
    const float part = body(streams[s], begin, end);
    float old = sum.load();
    while (!sum.compare_exchange_weak(old, old + part)) {
    }
  });
  return sum;
}
#endif
