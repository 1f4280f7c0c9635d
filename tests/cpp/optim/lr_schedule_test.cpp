#include "optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>

#include "../error_of.h"
#include "base/error.h"

namespace ds::optim {
namespace {

TEST(LrSchedule, WarmupGammaEndsAreExact) {
  for (int64_t steps : {0, 1, 2, 3, 10, 19, 1000, 123457}) {
    const int64_t counted = std::max<int64_t>(2, steps);
    EXPECT_EQ(warmup_gamma(WarmupCurve::kLog, steps, -1), 0);
    EXPECT_EQ(warmup_gamma(WarmupCurve::kLog, steps, 0), 0);
    EXPECT_EQ(warmup_gamma(WarmupCurve::kLog, steps, counted - 1), 1);
    EXPECT_EQ(warmup_gamma(WarmupCurve::kLinear, steps, 0), 0);
    EXPECT_EQ(warmup_gamma(WarmupCurve::kLinear, steps, counted), 1);
    EXPECT_LT(warmup_gamma(WarmupCurve::kLinear, steps, counted - 1), 1);
  }
  EXPECT_EQ(warmup_gamma(WarmupCurve::kLog, 10, int64_t{1} << 60), 1);
}

TEST(LrSchedule, DecayMeetsTheWarmupAndStopsAtTheLowerRate) {
  const WarmupDecayLr schedule({0.0, 0.1}, {1.0, 0.2}, 4, WarmupCurve::kLinear, 8);
  EXPECT_EQ(schedule.lr(4), (PerGroup{1.0, 0.2}));
  EXPECT_DOUBLE_EQ(schedule.lr(6)[0], 0.5);
  EXPECT_DOUBLE_EQ(schedule.lr(6)[1], 0.15);
  EXPECT_EQ(schedule.lr(8), (PerGroup{0.0, 0.1}));
  EXPECT_EQ(schedule.lr(1000000), (PerGroup{0.0, 0.1}));
}

TEST(LrSchedule, DecayShorterThanItsWarmupIsFinite) {
  const WarmupDecayLr decay({0.0}, {1.0}, 10, WarmupCurve::kLog, 5);
  const WarmupCosineLr cosine({1.0}, 0.0, 10, 0.25, WarmupCurve::kLog, 5);
  for (int64_t i = -1; i < 40; ++i) {
    EXPECT_TRUE(decay.lr(i)[0] >= 0 && decay.lr(i)[0] <= 1) << i;
    EXPECT_TRUE(cosine.lr(i)[0] >= 0 && cosine.lr(i)[0] <= 1) << i;
  }
  EXPECT_EQ(decay.lr(30)[0], 0);
  EXPECT_EQ(cosine.lr(30)[0], 0.25);
}

TEST(LrSchedule, CycleOfUnequalHalves) {
  const CycleShape shape{4, 8, 0, 0, 2};
  const double expected[] = {0, 0.25, 0.5, 0.75, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0, 0};
  for (int64_t k = 0; k < 15; ++k) EXPECT_EQ(shape.height(k - 1), expected[k]) << k;
  EXPECT_EQ(shape.decay_units(11), 0);
  EXPECT_EQ(shape.decay_units(12), 0.5);
  EXPECT_EQ(shape.decay_units(15), 2);
}

TEST(LrSchedule, StairsAreCountedInIntegers) {
  const CycleShape shape{100, 50, 100, 0, 0};
  EXPECT_EQ(shape.height(28), 29.0 / 100);  // in floating point 0.29 * 100 rounds down to 28
}

TEST(LrSchedule, WrongParametersAreNamed) {
  EXPECT_TRUE(says(error_of(ErrorKind::kValue,
                            [&] {
                              OneCycleLr({0.1}, {0.2, 0.3}, 0, CycleShape{1, 1, 0, 0, 0});
                            }),
                   "cycle_min_lr and cycle_max_lr have 1 and 2 values"));
  EXPECT_THROW(warmup_curve("Log"), Error);
  EXPECT_THROW(LrRangeTest({0.1}, 0, 1, false), Error);
  EXPECT_THROW(LrRangeTest({INFINITY}, 1, 1, false), Error);
}

}  // namespace
}  // namespace ds::optim
