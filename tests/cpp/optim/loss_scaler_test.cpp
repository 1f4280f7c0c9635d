#include "optim/loss_scaler.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace ds::optim {
namespace {

LossScaleState run(const LossScaleRules& rules, LossScaleState state,
                   const char* steps) {  // 'x' overflows, '.' does not
  for (; *steps; ++steps) state = next_loss_scale(rules, state, *steps == 'x');
  return state;
}

// What the scale is after each of the sequences.
void expect_scales(const LossScaleRules& rules, LossScaleState start,
                   std::initializer_list<std::pair<const char*, double>> expected) {
  for (const auto& [steps, scale] : expected) EXPECT_EQ(run(rules, start, steps).scale, scale) << steps;
}

TEST(LossScaler, RisesAfterAWindowOfCleanSteps) {
  LossScaleRules rules;
  rules.window = 4;
  expect_scales(rules, {8, 0, -1, 1}, {{"...", 8}, {"....", 16}, {"........", 32}, {"..x...", 4}, {"..x....", 8}});
}

TEST(LossScaler, SettlingStepsDoNotCount) {
  LossScaleRules rules;
  rules.window = 2;
  rules.settling = 1;
  expect_scales(rules, {8, 0, -1, 1}, {{".", 8}, {"..", 8}, {"...", 16}, {".....", 32}, {"x..", 4}, {"x...", 8}});
}

TEST(LossScaler, HysteresisToleratesOverflows) {
  LossScaleRules rules;
  rules.window = 100;
  rules.hysteresis = 3;
  EXPECT_EQ(run(rules, {64, 0, -1, 3}, "xx").scale, 64);
  EXPECT_EQ(run(rules, {64, 0, -1, 3}, "xxx").scale, 32);
  EXPECT_EQ(run(rules, {64, 0, -1, 3}, "xx.x").scale, 32);  // clean steps do not refill it...
  EXPECT_EQ(run(rules, {64, 0, -1, 3}, "xxxx").scale, 16);  // ...and it stays used up
  rules.consecutive_hysteresis = true;
  EXPECT_EQ(run(rules, {64, 0, -1, 3}, "xx.x").scale, 64);  // ...unless only consecutive ones count
  EXPECT_EQ(run(rules, {64, 0, -1, 3}, "xx.xxx").scale, 32);
}

TEST(LossScaler, WindowRefillsTheHysteresis) {
  LossScaleRules rules;
  rules.window = 2;
  rules.hysteresis = 2;
  EXPECT_EQ(run(rules, {64, 0, -1, 2}, "x..").scale, 128);
  EXPECT_EQ(run(rules, {64, 0, -1, 2}, "x..x").scale, 128);
}

TEST(LossScaler, FloorHoldsOrFails) {
  LossScaleRules rules;
  rules.min_scale = 3;
  EXPECT_EQ(run(rules, {16, 0, -1, 1}, "xx").scale, 4);
  EXPECT_EQ(run(rules, {16, 0, -1, 1}, "xxx").scale, 3);
  EXPECT_THROW(run(rules, {16, 0, -1, 1}, "xxxx"), Error);
  rules.raise_at_min = false;
  EXPECT_EQ(run(rules, {16, 0, -1, 1}, "xxxxxx").scale, 3);
}

TEST(LossScaler, WrongRulesAreNamed) {
  LossScaleRules rules;
  rules.window = 0;
  EXPECT_THROW(rules.validate(), Error);
  rules = {};
  rules.factor = 1;
  EXPECT_THROW(rules.validate(), Error);
  rules = {};
  rules.min_scale = 0;
  EXPECT_THROW(rules.validate(), Error);
  rules = {};
  rules.hysteresis = 0;
  EXPECT_THROW(rules.validate(), Error);
}

}  // namespace
}  // namespace ds::optim
