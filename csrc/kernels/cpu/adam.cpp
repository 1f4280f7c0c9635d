// Adam over many tensors: the formulas of kernels/adam.h, operation by operation, so that all widths agree bit for bit.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/adam.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/adam_math.h"
#include "kernels/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

struct NoLp {};
template <class D>
HWY_INLINE void store(D, hn::Vec<D>, NoLp*) {}

template <class Grad, class Lp>
void adam_elements(float* p, float* m, float* v, const Grad* grad, Lp* lp, size_t n, const AdamConstants& c) {
  const auto step = [&](auto d, size_t i) HWY_ATTR {
    const auto old = load(d, p + i);
    auto g = hn::Mul(load(d, grad + i), hn::Set(d, c.grad_scale));
    g = hn::Add(g, hn::Mul(hn::Set(d, c.decay_grad), old));
    auto first = load(d, m + i);
    auto second = load(d, v + i);
    first = hn::Add(first, hn::Mul(hn::Set(d, c.move1), hn::Sub(g, first)));
    second = hn::Add(second, hn::Mul(hn::Set(d, c.move2), hn::Sub(hn::Mul(g, g), second)));
    const auto root = hn::Add(hn::Mul(hn::Sqrt(second), hn::Set(d, c.inv_sqrt_correct)), hn::Set(d, c.eps));
    auto change = hn::Div(hn::Mul(hn::Set(d, c.step_size), first), root);
    change = hn::Add(change, hn::Mul(hn::Set(d, c.decay_param), old));
    const auto next = hn::Sub(old, change);
    store(d, first, m + i);
    store(d, second, v + i);
    store(d, next, p + i);
    store(d, next, lp + i);
  };
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) step(d, i);
  const hn::CappedTag<float, 1> one;
  for (; i < n; ++i) step(one, i);
}

// Everything in fp32 but the gradient and the copy: the case that counts.
void adam_fp32(float* p, float* m, float* v, const void* grad, DType grad_dtype, void* lp, DType lp_dtype, size_t n,
               const AdamConstants& c) {
  with_type(grad_dtype, [&](auto g) {
    const auto* from = static_cast<const decltype(g)*>(grad);
    if (lp == nullptr) return adam_elements(p, m, v, from, static_cast<NoLp*>(nullptr), n, c);
    with_type(lp_dtype, [&](auto l) { adam_elements(p, m, v, from, static_cast<decltype(l)*>(lp), n, c); });
  });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/entries.h"
#include "kernels/cpu/split.h"

namespace ds::kernels::cpu {
namespace {

constexpr auto kBodies = DS_BODIES(adam_fp32);

// Weights or moments that are not fp32 (and fp64 anywhere) pass through buffers of this many elements, which stay in
// the first-level cache.
constexpr size_t kTile = 1024;

template <class T>
T* at(T* data, DType dtype, size_t i) {  // T: void or const void
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return static_cast<Byte*>(data) + i * dtype_bytes(dtype);
}

// `data` itself where it is fp32, else a widened copy of it in `buffer`.
float* widened(decltype(KernelTable::copy) copy, void* data, DType dtype, size_t n, float* buffer) {
  if (dtype == DType::kF32) return static_cast<float*>(data);
  copy({}, buffer, DType::kF32, data, dtype, n, 1.0f);
  return buffer;
}

template <Isa isa>
void adam_tile(const AdamSegment& seg, size_t begin, size_t n, const AdamArgs& args, const AdamConstants& c) {
  const auto copy = kCopy[static_cast<int>(isa)];
  alignas(64) float buffers[4][kTile];
  void* master = at(seg.master, args.master_dtype, begin);
  void* exp_avg = at(seg.exp_avg, args.state_dtype, begin);
  void* exp_avg_sq = at(seg.exp_avg_sq, args.state_dtype, begin);
  const void* grad = at(seg.grad, args.grad_dtype, begin);
  float* p = widened(copy, master, args.master_dtype, n, buffers[0]);
  float* m = widened(copy, exp_avg, args.state_dtype, n, buffers[1]);
  float* v = widened(copy, exp_avg_sq, args.state_dtype, n, buffers[2]);
  DType grad_dtype = args.grad_dtype;
  if (grad_dtype == DType::kF64) {
    copy({}, buffers[3], DType::kF32, grad, grad_dtype, n, 1.0f);
    grad = buffers[3];
    grad_dtype = DType::kF32;
  }
  kBodies.by_isa[static_cast<int>(isa)](p, m, v, grad, grad_dtype, nullptr, DType::kF32, n, c);
  if (seg.lp != nullptr) copy({}, at(seg.lp, args.lp_dtype, begin), args.lp_dtype, p, DType::kF32, n, 1.0f);
  if (p == buffers[0]) copy({}, master, args.master_dtype, p, DType::kF32, n, 1.0f);
  if (m == buffers[1]) copy({}, exp_avg, args.state_dtype, m, DType::kF32, n, 1.0f);
  if (v == buffers[2]) copy({}, exp_avg_sq, args.state_dtype, v, DType::kF32, n, 1.0f);
}

template <Isa isa>
void adam(const Launch& launch, const AdamSegment* segments, size_t count, const AdamArgs& args,
          const StepScale* scale) {
  if (scale != nullptr && scale->skip) return;
  const AdamConstants c = adam_constants(args, scale != nullptr ? scale->grad_scale : 1.0f);
  const bool tiled = args.master_dtype != DType::kF32 || args.state_dtype != DType::kF32 ||
                     args.grad_dtype == DType::kF64 || args.lp_dtype == DType::kF64;
  split_segments(launch, segments, count, [&](size_t s, size_t begin, size_t end) {
    const AdamSegment& seg = segments[s];
    if (tiled) {
      for (; begin < end; begin += kTile) adam_tile<isa>(seg, begin, std::min(kTile, end - begin), args, c);
      return;
    }
    kBodies.by_isa[static_cast<int>(isa)](
        static_cast<float*>(seg.master) + begin, static_cast<float*>(seg.exp_avg) + begin,
        static_cast<float*>(seg.exp_avg_sq) + begin, at(seg.grad, args.grad_dtype, begin), args.grad_dtype,
        seg.lp == nullptr ? nullptr : at(seg.lp, args.lp_dtype, begin), args.lp_dtype, end - begin, c);
  });
}

}  // namespace

const decltype(KernelTable::adam) kAdam[kIsaCount] = DS_ENTRIES(adam);

}  // namespace ds::kernels::cpu
#endif
