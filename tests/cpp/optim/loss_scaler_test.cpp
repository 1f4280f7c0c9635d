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

// The scale after each of the sequences.
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
  // Clean steps do not refill it, and it stays used up...
  expect_scales(rules, {64, 0, -1, 3}, {{"xx", 64}, {"xxx", 32}, {"xx.x", 32}, {"xxxx", 16}});
  rules.consecutive_hysteresis = true;  // ...unless only consecutive ones count
  expect_scales(rules, {64, 0, -1, 3}, {{"xx.x", 64}, {"xx.xxx", 32}});
}

TEST(LossScaler, WindowRefillsTheHysteresis) {
  LossScaleRules rules;
  rules.window = 2;
  rules.hysteresis = 2;
  expect_scales(rules, {64, 0, -1, 2}, {{"x..", 128}, {"x..x", 128}});
}

TEST(LossScaler, FloorHoldsOrFails) {
  LossScaleRules rules;
  rules.min_scale = 3;
  expect_scales(rules, {16, 0, -1, 1}, {{"xx", 4}, {"xxx", 3}});
  EXPECT_THROW(run(rules, {16, 0, -1, 1}, "xxxx"), Error);
  rules.raise_at_min = false;
  expect_scales(rules, {16, 0, -1, 1}, {{"xxxxxx", 3}});
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
