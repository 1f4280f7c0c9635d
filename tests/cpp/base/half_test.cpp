// bf16 and fp16 conversions, over every 16-bit pattern and over the roundings between neighbours.
#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace ds {
namespace {

bool is_nan(float x) { return x != x; }

template <typename Half>
void every_pattern_survives(Half (*narrow)(float)) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float x = to_float(Half{static_cast<uint16_t>(bits)});
    if (is_nan(x)) {
      EXPECT_TRUE(is_nan(to_float(narrow(x)))) << bits;
    } else {
      EXPECT_EQ(narrow(x).bits, bits);
    }
  }
}

TEST(Bf16Test, EveryPatternSurvivesARoundTrip) { every_pattern_survives<Bf16>(&to_bf16); }
TEST(Fp16Test, EveryPatternSurvivesARoundTrip) { every_pattern_survives<Fp16>(&to_fp16); }

TEST(Fp16Test, KnownValues) {
  EXPECT_EQ(to_float(Fp16{0x3c00}), 1.0f);
  EXPECT_EQ(to_float(Fp16{0x0001}), 0x1p-24f);
  EXPECT_EQ(to_float(Fp16{0x7bff}), 65504.0f);
  EXPECT_EQ(to_float(Fp16{0xfc00}), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(to_fp16(65519.99f).bits, 0x7bff);
  EXPECT_EQ(to_fp16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_fp16(0x1p-25f).bits, 0);         // half of the smallest: a tie, to even
  EXPECT_EQ(to_fp16(0x1.000002p-25f).bits, 1);  // a little more
  EXPECT_EQ(to_fp16(-0.0f).bits, 0x8000);
}

TEST(Bf16Test, KnownValues) {
  EXPECT_EQ(to_float(Bf16{0x3f80}), 1.0f);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);  // rounds to infinity
  EXPECT_EQ(to_bf16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_bf16(0x1p-149f).bits, 0);  // the smallest fp32 subnormal
}

// A NaN whose payload lies only in the dropped bits must not become infinity.
TEST(HalfTest, SmallPayloadNanStaysNan) {
  EXPECT_TRUE(is_nan(to_float(to_bf16(bits_float(0x7f800001u)))));
  EXPECT_TRUE(is_nan(to_float(to_bf16(bits_float(0xff800001u)))));
  EXPECT_TRUE(is_nan(to_float(to_fp16(bits_float(0x7f800001u)))));
  EXPECT_TRUE(is_nan(to_float(to_fp16(bits_float(0xffffffffu)))));
}

// Between each pair of neighbours: below the middle goes down, above goes up, the middle goes to the even one.
template <typename Half, typename Convert>
void check_rounding(uint16_t last_finite, Convert convert) {
  for (uint16_t bits = 0; bits < last_finite; ++bits) {
    const double low = to_float(Half{bits}), high = to_float(Half{static_cast<uint16_t>(bits + 1)});
    const float middle = static_cast<float>((low + high) / 2);  // exact: one more bit than a half
    const uint16_t even = (bits & 1) ? bits + 1 : bits;
    EXPECT_EQ(convert(middle).bits, even) << bits;
    EXPECT_EQ(convert(std::nextafterf(middle, 0.0f)).bits, bits) << bits;
    EXPECT_EQ(convert(std::nextafterf(middle, INFINITY)).bits, bits + 1) << bits;
    EXPECT_EQ(convert(-middle).bits, even | 0x8000) << bits;
  }
}

TEST(Bf16Test, RoundsToNearestEven) {
  check_rounding<Bf16>(0x7f7f, [](float x) { return to_bf16(x); });
}

TEST(Fp16Test, RoundsToNearestEven) {
  check_rounding<Fp16>(0x7bff, [](float x) { return to_fp16(x); });
}

}  // namespace
}  // namespace ds
