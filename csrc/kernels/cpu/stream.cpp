#include "kernels/stream.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/stream.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void stream_range(const Stream& s, size_t begin, size_t end) {
  const hn::ScalableTag<float> d;
  const auto keep = hn::Set(d, 0.999f);
  const size_t lanes = hn::Lanes(d);
  for (size_t i = begin; i + lanes <= end; i += lanes) {  // the last few elements do not matter here
    const auto x = hn::LoadU(d, s.read + i);
    for (float* update : s.update)
      if (update != nullptr) hn::StoreU(hn::MulAdd(keep, hn::LoadU(d, update + i), x), d, update + i);
  }
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/split.h"

namespace ds::kernels::cpu {
constexpr auto kStreamBodies = DS_BODIES(stream_range);
}

void ds_cpu_stream(const ds::kernels::Launch& launch, const ds::kernels::Stream& s) {
  ds::Isa isa = ds::Isa::kScalar;
  for (int i = 0; i < ds::kIsaCount; ++i)
    if (ds::kernels::cpu::kStreamBodies.by_isa[i] != nullptr && ds::cpu_has(static_cast<ds::Isa>(i)))
      isa = static_cast<ds::Isa>(i);
  ds::kernels::cpu::split(launch, s.n, [&](size_t begin, size_t end) {
    ds::kernels::cpu::kStreamBodies.by_isa[static_cast<int>(isa)](s, begin, end);
  });
}
#endif
