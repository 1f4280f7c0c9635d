#include "io/crc32_fold.h"

#include <string.h>
#include <zlib.h>

#include "base/cpu_features.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// [Note: folding] Bytes are a polynomial over GF(2); their CRC is the remainder by a polynomial P of degree 32. What
// stands n bits before the end may be replaced by anything congruent: its product with (x^n mod P), which is 32 bits
// longer than the factor. So four registers of 16 bytes take the next 64 bytes each turn; at the end they become one
// register with the remainder of all that was read, and 16 bytes are summed as any others. Source: Gopal, Ozturk,
// Guilford, Wolrich, Feghali, Dixon, Karakoyunlu: "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction" (Intel, 2009).

namespace ds::io {

#if defined(__x86_64__)
namespace {

// x^n mod P, lowest power in the highest bit, as CRC-32 has it; one bit to the left, because the product of two numbers
// of that order comes one bit too far to the right.
constexpr long long x_to(int n) {
  uint32_t power = 0x80000000u;
  for (int i = 0; i < n; ++i) power = (power >> 1) ^ ((power & 1u) != 0 ? 0xedb88320u : 0u);
  return static_cast<long long>(power) << 1;
}

#define DS_FOLDS __attribute__((target("pclmul,sse4.1"), always_inline)) inline

DS_FOLDS __m128i loaded(const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

// `next`, and what is congruent to `sum` there. `factors`: for its first and its last 8 bytes.
DS_FOLDS __m128i folded(__m128i sum, __m128i factors, __m128i next) {
  const __m128i first = _mm_clmulepi64_si128(sum, factors, 0x00), last = _mm_clmulepi64_si128(sum, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, last), next);
}

// The destination of the bytes beside the sum: none, or memory in whole lines.
struct Nowhere {
  DS_FOLDS void put(size_t, __m128i) {}
  void rest(size_t, const char*, size_t) {}
};

struct Memory {
  char* to;
  DS_FOLDS void put(size_t at, __m128i bytes) { _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), bytes); }
  void rest(size_t at, const char* bytes, size_t count) {
    memcpy(to + at, bytes, count);
    _mm_sfence();  // other threads see the bytes before they are told of them
  }
};

// The sum is of the very registers that are put.
template <typename Target>
__attribute__((target("pclmul,sse4.1"))) uint32_t fold(const char* from, size_t bytes, uint32_t before, Target target) {
  const __m128i by_64 = _mm_set_epi64x(x_to(512 - 32), x_to(512 + 32));
  const __m128i by_16 = _mm_set_epi64x(x_to(128 - 32), x_to(128 + 32));
  __m128i sums[4];
  for (size_t i = 0; i < 4; ++i) {
    sums[i] = loaded(from + 16 * i);
    target.put(16 * i, sums[i]);
  }
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(~before)));
  size_t at = 64;
  for (; bytes - at >= 64; at += 64) {
    for (size_t i = 0; i < 4; ++i) {
      const __m128i next = loaded(from + at + 16 * i);
      target.put(at + 16 * i, next);
      sums[i] = folded(sums[i], by_64, next);
    }
  }
  __m128i sum = folded(folded(folded(sums[0], by_16, sums[1]), by_16, sums[2]), by_16, sums[3]);
  for (; bytes - at >= 16; at += 16) {
    const __m128i next = loaded(from + at);
    target.put(at, next);
    sum = folded(sum, by_16, next);
  }
  char left[16];  // the last ones; read once, as all others
  memcpy(left, from + at, bytes - at);
  target.rest(at, left, bytes - at);
  alignas(16) Bytef text[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(text), sum);
  // The start value is in the sum already: here it is none, which zlib calls ~0.
  const uLong all = ::crc32_z(0xffffffffu, text, sizeof(text));
  return static_cast<uint32_t>(::crc32_z(all, reinterpret_cast<const Bytef*>(left), bytes - at));
}

}  // namespace

bool can_fold_crc32() {
  static const bool can = cpu_has(Isa::kSse4);
  return can;
}

uint32_t fold_crc32(const void* data, size_t bytes, uint32_t before) {
  return fold(static_cast<const char*>(data), bytes, before, Nowhere{});
}

uint32_t fold_and_stream_crc32(char* to, const char* from, size_t bytes, uint32_t before) {
  return fold(from, bytes, before, Memory{to});
}
#else
bool can_fold_crc32() { return false; }

uint32_t fold_crc32(const void* data, size_t bytes, uint32_t before) {
  return static_cast<uint32_t>(::crc32_z(before, static_cast<const Bytef*>(data), bytes));
}

uint32_t fold_and_stream_crc32(char* to, const char* from, size_t bytes, uint32_t before) {
  memcpy(to, from, bytes);
  return fold_crc32(to, bytes, before);
}
#endif

}  // namespace ds::io
