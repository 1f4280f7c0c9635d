#include "plan/length_plan.h"

#include <gtest/gtest.h>

#include <functional>

#include "base/error.h"

namespace ds::plan {
namespace {

using Bytes = std::function<int64_t(int64_t)>;

LengthCurve curve(const std::vector<std::vector<Bytes>>& moments, const std::vector<int64_t>& lengths) {
  std::vector<LengthSample> samples;
  for (const int64_t length : lengths) {
    LengthSample one{length, {}};
    for (const auto& parts : moments) {
      one.moments.emplace_back();
      for (const Bytes& part : parts) one.moments.back().push_back(part(length));
    }
    samples.push_back(one);
  }
  return LengthCurve(samples);
}

int64_t states(int64_t) { return 5'000'000'000; }
int64_t kept(int64_t n) { return 70'000 * n; }
int64_t scores(int64_t n) { return 3 * n * n + 11 * n + 7; }
int64_t head(int64_t n) { return 1'000'000 + 90'000 * n; }

TEST(LengthCurve, PolynomialsOfSecondDegreeAreMetExactlyAtAnyLength) {
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{64, 128, 192}, {1, 2, 3}, {100, 350, 4000}}) {
    const LengthCurve made = curve({{states, kept, scores}}, lengths);
    for (const int64_t n : {1, 7, 64, 500, 4096, 131072, 1 << 20}) {
      EXPECT_EQ(made.parts(n), (std::vector<int64_t>{states(n), kept(n), scores(n)}));
      EXPECT_EQ(made.peak(n), states(n) + kept(n) + scores(n));
    }
  }
}

TEST(LengthCurve, AnotherMomentMayBeTheLargestWhereNobodyHasLooked) {
  // At the lengths of the samples the head needs more, at a hundred times these the scores do.
  const LengthCurve made = curve({{states, head}, {states, scores}}, {100, 200, 300});
  EXPECT_EQ(made.moment(200), 0);
  EXPECT_EQ(made.moment(40'000), 1);
  EXPECT_EQ(made.peak(40'000), states(0) + scores(40'000));
}

TEST(LengthCurve, TheLongestIsTheLastThatFits) {
  const LengthCurve made = curve({{states, kept, scores}}, {100, 200, 300});
  for (const int64_t step : {1, 8, 96}) {
    for (const int64_t memory : {int64_t{6'000'000'000}, int64_t{20'000'000'000}, int64_t{80'000'000'000}}) {
      const int64_t found = made.longest(memory, step, int64_t{1} << 32);
      EXPECT_EQ(found % step, 0);
      EXPECT_LE(made.peak(found), memory);
      EXPECT_GT(made.peak(found + step), memory);
    }
  }
  EXPECT_EQ(made.longest(states(0), 1, 1 << 20), 0);
  EXPECT_EQ(made.longest(int64_t{1} << 60, 64, 1000), 960);
}

TEST(LengthCurve, PolynomialsOfNeighboursWhereNoneGoesThroughAllSamples) {
  const auto bent = [](int64_t n) { return n <= 400 ? 10 * n : 10 * 400 + 70 * (n - 400); };
  const LengthCurve three = curve({{states, bent}}, {100, 200, 300});
  const LengthSample far{1600, {{states(0), bent(1600)}}};
  EXPECT_EQ(three.miss({400, {{states(0), bent(400)}}}), 0);
  EXPECT_GT(curve({{bent}}, {100, 200, 300}).miss({1600, {{bent(1600)}}}), 800);  // thousandths
  EXPECT_EQ(three.miss(far), 1);                                                  // states are most of it
  const LengthCurve more = curve({{bent}}, {100, 200, 300, 400, 800, 1200, 1600});
  for (const int64_t n : {50, 100, 250, 399, 400, 900, 1600, 100'000}) EXPECT_EQ(more.peak(n), bent(n)) << n;
  EXPECT_EQ(more.longest(bent(1700), 1, 1 << 20), 1700);
  EXPECT_EQ(more.longest(bent(350), 1, 1 << 20), 350);
  EXPECT_THROW(three.miss({400, {{1}}}), Error);
}

TEST(LengthCurve, HugeLengthsDoNotOverflow) {
  const LengthCurve made = curve({{states, scores}}, {1 << 18, 1 << 19, 3 << 18});
  EXPECT_GT(made.peak(int64_t{1} << 40), int64_t{1} << 50);
}

TEST(LengthCurve, SamplesThatMakeNoCurveAreRefused) {
  const auto refused = [](std::vector<LengthSample> samples) { EXPECT_THROW(LengthCurve{std::move(samples)}, Error); };
  refused({{1, {{1}}}, {2, {{1}}}});
  refused({{1, {{1}}}, {1, {{1}}}, {2, {{1}}}});
  refused({{1, {{1}}}, {2, {{1, 2}}}, {3, {{1}}}});
  refused({{1, {{1}}}, {2, {{1}, {1}}}, {3, {{1}}}});
  refused({{1, {}}, {2, {}}, {3, {}}});
  EXPECT_THROW(curve({{states}}, {1, 2, 3}).longest(1, 0, 5), Error);
}

TEST(CheapestStep, IsTheFirstThatGainsEnough) {
  EXPECT_EQ(cheapest_step({100, 105, 120, 400}, 100, 10), 2);
  EXPECT_EQ(cheapest_step({100, 105, 109}, 100, 10), -1);
  EXPECT_EQ(cheapest_step({0, 8}, 0, 10), 1);
  EXPECT_EQ(cheapest_step({}, 5, 10), -1);
}

}  // namespace
}  // namespace ds::plan
