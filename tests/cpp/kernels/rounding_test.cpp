// Every boundary between two neighbouring 16-bit numbers, on every instruction set: what lies at, just below and just
// above the middle, against rounding to nearest even as IEEE 754 defines it (section 4.3.1), without the reference.
#include <algorithm>

#include "support.h"

namespace ds::kernels::test {
namespace {

// The value of a positive finite pattern, and what the next power of two would be: infinity begins half a unit below.
double value_of(DType dtype, unsigned bits) {
  const int mantissa_bits = dtype == DType::kF16 ? 10 : 7, bias = dtype == DType::kF16 ? 15 : 127;
  const int exponent = static_cast<int>(bits >> mantissa_bits);
  const double mantissa = bits & ((1u << mantissa_bits) - 1);
  if (exponent == 0) return std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

TEST(RoundingTest, EveryMiddleOfNeighboursGoesToTheEvenOne) {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    const unsigned infinity = dtype == DType::kF16 ? 0x7c00 : 0x7f80;
    std::vector<float> source;
    std::vector<uint16_t> expected;
    for (unsigned bits = 0; bits < infinity; ++bits) {
      const double low = value_of(dtype, bits), high = value_of(dtype, bits + 1), middle = (low + high) / 2;
      const auto at = static_cast<float>(middle);
      if (at != middle || std::nextafter(at, INFINITY) == INFINITY) continue;  // fp32 has no such number
      for (float x : {std::nextafter(at, -INFINITY), at, std::nextafter(at, INFINITY), static_cast<float>(low)}) {
        const bool up = x > middle || (x == middle && bits % 2 == 1);
        for (unsigned sign : {0u, 0x8000u}) {
          source.push_back(sign ? -x : x);
          expected.push_back(static_cast<uint16_t>((up ? bits + 1 : bits) | sign));
        }
      }
    }
    ASSERT_GT(source.size(), 8u * 31000u);
    std::vector<uint16_t> got(source.size());
    std::vector<float> back(source.size());
    for (const KernelTable* table : isa_tables()) {
      table->copy({}, got.data(), dtype, source.data(), DType::kF32, source.size(), 1.0f);
      for (size_t i = 0; i < source.size(); ++i)
        ASSERT_EQ(got[i], expected[i]) << table->isa << " " << dtype_name(dtype) << " of " << source[i];
      table->copy({}, back.data(), DType::kF32, got.data(), dtype, got.size(), 1.0f);
      for (size_t i = 0; i < back.size(); ++i) {
        const double magnitude = value_of(dtype, got[i] & 0x7fffu);
        const double want = (got[i] & 0x7fffu) == infinity ? INFINITY : magnitude;
        ASSERT_EQ(back[i], (got[i] & 0x8000u) != 0 ? -want : want) << table->isa << " " << dtype_name(dtype);
      }
    }
  }
}

}  // namespace
}  // namespace ds::kernels::test
