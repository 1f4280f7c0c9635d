// Adam on 8-bit states ([Note: 8-bit states] in kernels/code_book.h): each block is decoded into the first-level cache,
// updated by the body of Adam, and encoded.
#include "kernels/code_book.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/adam8bit.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {
using namespace hwy::HWY_NAMESPACE;

// Constants of the levels: a shuffle where a vector holds them all.
template <class D>
struct Levels {
  Levels(D d, const float* constants) : constants(constants), all(Load(d, constants)) {}
  template <class I>
  HWY_INLINE Vec<D> pick(D d, I levels) const {
    if constexpr (MaxLanes(D()) >= kCodeLevels) {
      return TableLookupLanes(all, IndicesFromVec(d, levels));
    } else {
      return GatherIndex(d, constants, levels);
    }
  }
  const float* constants;
  Vec<D> all;
};

// Added to a float below 2^22 it leaves the nearest whole number in the low bits: cheaper than a conversion, which
// would have to care for numbers that are too large.
constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23
constexpr int32_t kWholeBits = 0x4b400000;

// x[i] = values[codes[i]] * max, for kCodeBlock elements.
void decode_block(const CodeBook& book, const unsigned char* codes, float max, float* x) {
  const ScalableTag<float> d;
  const RebindToSigned<decltype(d)> di;
  const Rebind<uint8_t, decltype(d)> d8;
  const Levels<decltype(d)> offset(d, book.offset), slope(d, book.slope);
  const auto zero = Set(di, book.zero), below = Set(di, book.ranks_below);
  const auto least = Set(di, 127 + book.ranks_below);
  const auto factor = Set(d, max);
  for (size_t i = 0; i < kCodeBlock; i += Lanes(d)) {
    const auto steps = Sub(PromoteTo(di, LoadU(d8, codes + i)), zero);
    const auto rank = BitCast(di, ConvertTo(d, Add(Abs(steps), below)));
    const auto level = And(Sub(ShiftRight<23>(rank), least), Set(di, kCodeLevels - 1));
    const auto part = BitCast(d, Or(And(rank, Set(di, 0x7fffff)), Set(di, 0x3f800000)));
    const auto size = Add(offset.pick(d, level), Mul(slope.pick(d, level), part));
    const auto sign = BitCast(d, And(steps, Set(di, INT32_MIN)));
    const auto value = IfThenZeroElse(RebindMask(d, Eq(steps, Zero(di))), Or(size, sign));
    Store(Mul(value, factor), d, x + i);
  }
}

// The maximum (into *max) and the codes of kCodeBlock elements.
void encode_block(const CodeBook& book, const float* x, unsigned char* codes, float* max) {
  const ScalableTag<float> d;
  const RebindToSigned<decltype(d)> di;
  const Rebind<uint8_t, decltype(d)> d8;
  const size_t lanes = Lanes(d);
  // Bits of absolute values are in the order of the numbers, and those of NaN above all.
  const auto absolute = Set(di, 0x7fffffff);
  auto most = Zero(di), most2 = Zero(di);  // two, so that neither waits for the other
  for (size_t i = 0; i < kCodeBlock; i += 2 * lanes) {
    most = Max(most, And(BitCast(di, Load(d, x + i)), absolute));
    most2 = Max(most2, And(BitCast(di, Load(d, x + i + lanes)), absolute));
  }
  const int32_t top = GetLane(MaxOfLanes(di, Max(most, most2)));
  float largest;
  __builtin_memcpy(&largest, &top, sizeof largest);
  *max = largest;
  const auto zero = Set(di, book.zero);
  if (!(largest > 0 && largest < __builtin_inff())) {
    for (size_t i = 0; i < kCodeBlock; i += lanes) StoreU(DemoteTo(d8, zero), d8, codes + i);
    return;
  }
  const Levels<decltype(d)> until(d, book.until), scale(d, book.scale), bias(d, book.bias), last(d, book.last);
  const auto divisor = Set(d, largest), least = Set(d, book.from[0]);
  const auto start = Set(di, book.zero - book.ranks_below - kWholeBits), whole_bits = Set(di, kWholeBits);
  // The bits of a float, as a number, are its logarithm but for an error of 0.086 * 2^23. A decade's level begins
  // between 0 and 0.28 above the power of ten: a guess that is half a decade late is right or one too low.
  const auto decades = Set(d, 0.30103f / (1 << 23)), late = Set(d, 7 - 127 * 0.30103f - 1.0f);
  const auto whole = Set(d, kWhole);
  for (size_t i = 0; i < kCodeBlock; i += lanes) {
    const auto y = Div(Load(d, x + i), divisor);
    const auto size = Abs(y);
    const auto bits = ConvertTo(d, BitCast(di, size));
    const auto guess = Add(Add(Mul(bits, decades), late), whole);
    auto level = Max(Sub(BitCast(di, guess), whole_bits), Zero(di));
    const auto higher = RebindMask(di, Ge(size, until.pick(d, level)));
    level = IfThenElse(higher, Add(level, Set(di, 1)), level);
    const auto scaled = Add(Mul(size, scale.pick(d, level)), bias.pick(d, level));
    const auto rank = CopySignToAbs(Min(scaled, last.pick(d, level)), y);
    const auto code = Add(start, BitCast(di, Add(rank, whole)));
    const auto none = RebindMask(di, Lt(size, least));
    StoreU(DemoteTo(d8, IfThenElse(none, zero, code)), d8, codes + i);  // -1, not in the book, becomes 0
  }
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cstring>

#include "kernels/adam.h"
#include "kernels/cpu/split.h"
#include "kernels/cpu/update.h"

namespace ds::kernels::cpu {
namespace {

constexpr CodeBook kBooks[] = {make_code_book(true), make_code_book(false)};

void adam8bit(const Launch& launch, Isa isa, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
              const StepScale& scale) {
  const auto decode = DS_BODY(decode_block, isa);
  const auto encode = DS_BODY(encode_block, isa);
  const UpdateBody adam = static_cast<const CpuUpdate*>(find_update("adam"))->bodies.by_isa[static_cast<int>(isa)];
  UpdateArgs inner = args;
  inner.state_dtype = DType::kF32;
  // Whole blocks are what is spread over the threads.
  struct Blocks {
    size_t numel;
  };
  std::vector<Blocks> blocks(count);
  for (size_t s = 0; s < count; ++s) blocks[s].numel = code_blocks(segments[s].numel);
  const auto update = [&](size_t s, size_t first, size_t last) {
    alignas(64) float states[2][kCodeBlock];
    unsigned char shorter[kCodeBlock] = {};  // instead of the codes of a last block that is not full
    const UpdateSegment& whole = segments[s];
    for (size_t block = first; block < last; ++block) {
      const size_t begin = block * kCodeBlock, n = std::min(kCodeBlock, whole.numel - begin);
      UpdateSegment part = whole;
      for (int k = 0; k < 2; ++k) {
        const unsigned char* codes = static_cast<const unsigned char*>(whole.states[k]) + begin;
        if (n < kCodeBlock) codes = static_cast<const unsigned char*>(std::memcpy(shorter, codes, n));
        decode(kBooks[k], codes, static_cast<const float*>(whole.states[2 + k])[block], states[k]);
      }
      // update_range counts elements from the segment's start; these states begin at the block's.
      const auto at = [&](const void* data, DType dtype) {
        return data == nullptr ? nullptr
                               : const_cast<char*>(static_cast<const char*>(data)) + begin * dtype_bytes(dtype);
      };
      part.master = at(whole.master, args.master_dtype);
      part.grad = at(whole.grad, args.grad_dtype);
      part.lp = at(whole.lp, args.lp_dtype);
      part.states[0] = states[0];
      part.states[1] = states[1];
      part.numel = n;
      update_range(isa, part, 0, n, inner, 2, scale.grad_scale, adam);
      for (int k = 0; k < 2; ++k) {
        unsigned char* codes = static_cast<unsigned char*>(whole.states[k]) + begin;
        std::memset(states[k] + n, 0, (kCodeBlock - n) * sizeof(float));  // they must not be a maximum
        encode(kBooks[k], states[k], n < kCodeBlock ? shorter : codes,
               static_cast<float*>(whole.states[2 + k]) + block);
        if (n < kCodeBlock) std::memcpy(codes, shorter, n);
      }
    }
  };
  split_segments(launch, blocks.data(), count, update, kCodeBlock);
}

const UpdateRegistration registration("adam8bit", 4, sizeof(AdamConstants), &adam8bit);

}  // namespace
}  // namespace ds::kernels::cpu
#endif
