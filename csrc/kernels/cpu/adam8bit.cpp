// Adam on 8-bit states ([Note: 8-bit states] in kernels/code_book.h): each block is decoded into the first-level cache,
// updated by the body of Adam, and encoded.
#include "kernels/code_book.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/adam8bit.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#ifndef DS_KERNELS_CPU_ADAM8BIT_TABLES
#define DS_KERNELS_CPU_ADAM8BIT_TABLES
namespace ds::kernels {

// From the leading bits of |y| (sign, exponent, kEdgeBits of the fraction) straight to the code or the one below it: no
// two midpoints share those bits.
constexpr int kEdgeBits = 7, kSmallest = 127 - 23;  // 2^-23: all midpoints are above it
constexpr int kEdges = (23 << kEdgeBits) + 1;       // up to y = 1

struct CodeTables {
  CodeBook book;
  unsigned char start[2 * kEdges + 4];  // of y >= 0, then of y < 0; read four bytes at a time
};

}  // namespace ds::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// x[i] = values[codes[i]] * max, for the kCodeBlock elements of x, of which n are of the tensor.
void decode_range(const CodeTables& tables, const unsigned char* codes, float max, size_t n, float* x) {
  for (size_t i = 0; i < n; ++i) x[i] = tables.book.values[codes[i]] * max;
}

// The maximum (into *max) and the codes of x, which has zeros behind its n elements.
void encode_range(const CodeTables& tables, const float* x, size_t n, unsigned char* codes, float* max) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const size_t lanes = hn::Lanes(d);
  auto most = hn::Zero(d), bad = hn::Zero(d);
  for (size_t i = 0; i < kCodeBlock; i += lanes) {
    const auto v = hn::Load(d, x + i);
    most = hn::Max(most, hn::Abs(v));
    bad = hn::Or(bad, hn::IfThenZeroElse(hn::Eq(v, v), hn::Set(d, 1.0f)));
  }
  const float largest = hn::GetLane(hn::MaxOfLanes(d, most));
  const bool nan = hn::GetLane(hn::MaxOfLanes(d, bad)) != 0;
  *max = nan ? __builtin_nanf("") : largest;
  if (!(largest > 0 && largest < __builtin_inff()) || nan) {  // the code of 0
    const float zero = 0;
    int code = 0;
    while (code < 255 && zero >= tables.book.midpoints[code]) ++code;
    for (size_t i = 0; i < n; ++i) codes[i] = static_cast<unsigned char>(code);
    return;
  }
  HWY_ALIGN int32_t found[kCodeBlock];
  const auto divisor = hn::Set(d, largest);
  const auto last = hn::Set(di, kEdges - 1), zero = hn::Zero(di);
  for (size_t i = 0; i < kCodeBlock; i += lanes) {
    const auto y = hn::Div(hn::Load(d, x + i), divisor);
    const auto bits = hn::BitCast(di, hn::Abs(y));
    auto edge = hn::Sub(hn::ShiftRight<23 - kEdgeBits>(bits), hn::Set(di, kSmallest << kEdgeBits));
    edge = hn::Min(hn::Max(edge, zero), last);
    const auto negative = hn::RebindMask(di, hn::Lt(y, hn::Zero(d)));
    edge = hn::Add(edge, hn::IfThenElseZero(negative, hn::Set(di, kEdges)));
    const auto word = hn::GatherOffset(di, reinterpret_cast<const int32_t*>(tables.start), edge);
    const auto low = hn::And(word, hn::Set(di, 0xff));
    const auto up = hn::RebindMask(di, hn::Ge(y, hn::GatherIndex(d, tables.book.midpoints, low)));
    hn::Store(hn::Add(low, hn::IfThenElseZero(up, hn::Set(di, 1))), di, found + i);
  }
  for (size_t i = 0; i < n; ++i) codes[i] = static_cast<unsigned char>(found[i]);
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

constexpr auto kDecode = DS_BODIES(decode_range);
constexpr auto kEncode = DS_BODIES(encode_range);

int code_of(const CodeBook& book, float y) {
  int code = 0;
  while (code < 255 && y >= book.midpoints[code]) ++code;
  return code;
}

CodeTables make_tables(bool is_signed) {
  CodeTables tables{make_code_book(is_signed), {}};
  for (int edge = 0; edge < kEdges; ++edge) {
    const auto number = [](int leading) {
      const uint32_t bits = static_cast<uint32_t>(leading + (kSmallest << kEdgeBits)) << (23 - kEdgeBits);
      float y;
      std::memcpy(&y, &bits, 4);
      return y;
    };
    tables.start[edge] = static_cast<unsigned char>(code_of(tables.book, edge == 0 ? 0.0f : number(edge)));
    tables.start[kEdges + edge] = static_cast<unsigned char>(code_of(tables.book, -number(edge + 1)));
  }
  return tables;
}

const CodeTables& tables(bool is_signed) {
  static const CodeTables kSigned = make_tables(true), kUnsigned = make_tables(false);
  return is_signed ? kSigned : kUnsigned;
}

void adam8bit(const Launch& launch, Isa isa, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
              const StepScale& scale) {
  const int i = static_cast<int>(isa);
  const UpdateBody adam = static_cast<const CpuUpdate*>(find_update("adam"))->bodies.by_isa[i];
  const CodeTables* books[] = {&tables(true), &tables(false)};
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
    const UpdateSegment& whole = segments[s];
    for (size_t block = first; block < last; ++block) {
      const size_t begin = block * kCodeBlock, n = std::min(kCodeBlock, whole.numel - begin);
      std::memset(states, 0, sizeof states);
      UpdateSegment part = whole;
      for (int k = 0; k < 2; ++k) {
        const float max = static_cast<const float*>(whole.states[2 + k])[block];
        kDecode.by_isa[i](*books[k], static_cast<const unsigned char*>(whole.states[k]) + begin, max, n, states[k]);
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
      for (int k = 0; k < 2; ++k)
        kEncode.by_isa[i](*books[k], states[k], n, static_cast<unsigned char*>(whole.states[k]) + begin,
                          static_cast<float*>(whole.states[2 + k]) + block);
    }
  };
  split_segments(launch, blocks.data(), count, update, kCodeBlock);
}

const UpdateRegistration registration("adam8bit", 4, sizeof(AdamConstants), &adam8bit);

}  // namespace
}  // namespace ds::kernels::cpu
#endif
