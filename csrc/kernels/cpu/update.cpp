// The walk of every update kernel over its segments: in place if all is fp32, else through small buffers.
#include "kernels/random_rounding.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/update.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"
#include "kernels/cpu/random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

// random_bf16 of [Note: random rounding] for elements first, first + 1, ...
void random_bf16_range(uint16_t* dst, const float* src, size_t n, RandomKey key, uint32_t first) {
  each_element(n, [&](auto d, size_t i) HWY_ATTR {
    const RebindToUnsigned<decltype(d)> d32;
    const RebindToSigned<decltype(d)> s32;
    const auto u = BitCast(d32, LoadU(d, src + i));
    const auto random = random_bits_from(d32, key, first + static_cast<uint32_t>(i));
    const auto rounded = ShiftRight<16>(Add(u, And(random, Set(d32, 0xffffu))));
    const auto magnitude = BitCast(s32, And(u, Set(d32, 0x7fffffffu)));
    const auto high = ShiftRight<16>(u);
    const auto nan = RebindMask(d32, Gt(magnitude, Set(s32, 0x7f800000)));
    const auto special = RebindMask(d32, Gt(magnitude, Set(s32, 0x7f7fffff)));
    const auto kept = IfThenElse(nan, Or(high, Set(d32, 0x40u)), high);
    store_low_halves(d32, IfThenElse(special, kept, rounded), dst + i);
  });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cstring>

#include "kernels/cpu/entries.h"
#include "kernels/cpu/split.h"
#include "kernels/cpu/update.h"

namespace ds::kernels::cpu {
namespace {

// Weights or states that are not fp32 (and fp64 anywhere) pass through buffers of this many elements, which stay in
// the first-level cache.
constexpr size_t kTile = 1024;

template <class T>
T* at(T* data, DType dtype, size_t i) {  // T: void or const void
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return data == nullptr ? nullptr : static_cast<Byte*>(data) + i * dtype_bytes(dtype);
}

class Tile {
 public:
  Tile(Isa isa, const UpdateSegment& segment, const UpdateArgs& args, size_t begin, size_t n)
      : isa_(static_cast<int>(isa)), segment_(segment), args_(args), begin_(begin), n_(n) {}

  void run(int states, float grad_scale, UpdateBody body) {
    UpdateRange range{};
    range.n = n_;
    range.grad_scale = grad_scale;
    range.scratch = segment_.scratch == nullptr ? nullptr : segment_.scratch + begin_;
    range.master = widened(segment_.master, args_.master_dtype, 0);
    for (int k = 0; k < states; ++k) range.states[k] = widened(segment_.states[k], args_.state_dtype, 1 + k);
    range.grad = at(segment_.grad, args_.grad_dtype, begin_);
    range.grad_dtype = args_.grad_dtype;
    if (args_.grad_dtype == DType::kF64) {
      kCopy[isa_]({}, grad_, DType::kF32, range.grad, DType::kF64, n_, 1.0f);
      range.grad = grad_;
      range.grad_dtype = DType::kF32;
    }
    range.lp_dtype = DType::kF32;  // written below
    body(range, args_.constants);
    if (segment_.lp != nullptr) narrow(segment_.lp, args_.lp_dtype, range.master);
    put_back(segment_.master, args_.master_dtype, range.master, 0);
    for (int k = 0; k < states; ++k) put_back(segment_.states[k], args_.state_dtype, range.states[k], 1 + k);
  }

 private:
  // `data` itself where it is fp32, else a widened copy of it in a buffer.
  float* widened(void* data, DType dtype, int array) {
    void* from = at(data, dtype, begin_);
    if (dtype == DType::kF32) return static_cast<float*>(from);
    kCopy[isa_]({}, buffers_[array], DType::kF32, from, dtype, n_, 1.0f);
    return buffers_[array];
  }
  void narrow(void* data, DType dtype, const float* from) {
    kCopy[isa_]({}, at(data, dtype, begin_), dtype, from, DType::kF32, n_, 1.0f);
  }
  void put_back(void* data, DType dtype, const float* from, int array) {
    if (from != buffers_[array]) return;
    if (!args_.stochastic || dtype != DType::kBF16) return narrow(data, dtype, from);
    DS_BODY(random_bf16_range, isa_)
    (static_cast<uint16_t*>(data) + begin_, from, n_,
     random_key(args_.seed, segment_.stream, static_cast<uint32_t>(array)), static_cast<uint32_t>(begin_));
  }

  const int isa_;
  const UpdateSegment& segment_;
  const UpdateArgs& args_;
  const size_t begin_, n_;
  alignas(64) float buffers_[1 + kMaxStates][kTile];
  alignas(64) float grad_[kTile];
};

bool in_place(const UpdateArgs& args) {
  return args.master_dtype == DType::kF32 && args.state_dtype == DType::kF32 && args.grad_dtype != DType::kF64 &&
         args.lp_dtype != DType::kF64;
}

template <Isa isa>
void update(const Launch& launch, const UpdateKernel& kernel, const UpdateSegment* segments, size_t count,
            const UpdateArgs& args, const StepScale* scale) {
  static constexpr StepScale kPlain = {0, 1.0f, 0};
  const StepScale& given = scale != nullptr ? *scale : kPlain;
  if (given.skip) return;
  const auto& own = static_cast<const CpuUpdate&>(kernel);
  if (own.pass != nullptr) return own.pass(launch, isa, segments, count, args, given);
  const UpdateBody body = own.bodies.by_isa[static_cast<int>(isa)];
  split_segments(launch, segments, count, [&](size_t s, size_t begin, size_t end) {
    update_range(isa, segments[s], begin, end, args, own.states, given.grad_scale, body);
  });
}

}  // namespace

std::vector<CpuUpdate>& updates() {
  static std::vector<CpuUpdate> all;
  return all;
}

const UpdateKernel* find_update(const char* name) {
  for (const CpuUpdate& one : updates())
    if (std::strcmp(one.name, name) == 0) return &one;
  return nullptr;
}

const char* update_name(size_t index) { return index < updates().size() ? updates()[index].name : nullptr; }

void update_range(Isa isa, const UpdateSegment& seg, size_t begin, size_t end, const UpdateArgs& args, int states,
                  float grad_scale, UpdateBody body) {
  if (!in_place(args)) {
    for (; begin < end; begin += kTile)
      Tile(isa, seg, args, begin, std::min(kTile, end - begin)).run(states, grad_scale, body);
    return;
  }
  UpdateRange range{};
  range.master = static_cast<float*>(seg.master) + begin;
  for (int k = 0; k < states; ++k) range.states[k] = static_cast<float*>(seg.states[k]) + begin;
  range.grad = at(seg.grad, args.grad_dtype, begin);
  range.grad_dtype = args.grad_dtype;
  range.lp = at(seg.lp, args.lp_dtype, begin);
  range.lp_dtype = args.lp_dtype;
  range.n = end - begin;
  range.grad_scale = grad_scale;
  range.scratch = seg.scratch == nullptr ? nullptr : seg.scratch + begin;
  body(range, args.constants);
}

const decltype(KernelTable::update) kUpdate[kIsaCount] = DS_ENTRIES(update);

}  // namespace ds::kernels::cpu
#endif
