// The places that take the least time, against a sweep over all of them.
#include "plan/place_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace ds::plan {
namespace {

constexpr int64_t kMany = INT64_MAX;

// Adam, bf16: 2 + 4 + 8 bytes, and 2 of the weight.
PlaceNeed need_of(int64_t device, int64_t host, int64_t files) {
  PlaceNeed need;
  need.numel = 1000;
  need.grad = 2;
  need.master = 4;
  need.slots = 8;
  need.weight = 2;
  need.room = {device, host, files};
  return need;
}

PlaceRates usual() { return {10e9, 12e9, 3e9, 2e9, 20e9, 1000e9}; }

double share(const PlaceShares& of, int tier) { return tier == 0 ? of.device() : tier == 1 ? of.host : of.file; }

// Each of `blocks` equal blocks of each kind is in one tier: the best of all ways to do so.
double swept(const PlaceNeed& need, const PlaceRates& rates, int blocks) {
  std::vector<std::array<double, 3>> seconds;
  std::vector<std::array<double, 3>> bytes;
  for (int c = 0; c < 27; ++c) {
    const int tiers[] = {c / 9, c / 3 % 3, c % 3};
    seconds.push_back(place_seconds(need, rates, PlaceTier(tiers[0]), PlaceTier(tiers[1]), PlaceTier(tiers[2])));
    bytes.push_back({});
    const double of[] = {need.grad, need.master, need.slots};
    for (int k = 0; k < 3; ++k) bytes.back()[tiers[k]] += of[k] * static_cast<double>(need.numel);
  }
  double best = HUGE_VAL;
  std::array<double, 3> spent = {};
  std::array<double, 3> used = {};
  const std::function<void(int, int)> place = [&](int block, int from) {
    for (int t = 0; t < 3; ++t)
      if (used[t] > static_cast<double>(need.room[t]) + 0.5) return;
    const double longest = *std::max_element(spent.begin(), spent.end());
    if (longest >= best) return;
    if (block == blocks) {
      best = longest;
      return;
    }
    for (int c = from; c < 27; ++c) {  // in one order: which block has which does not matter
      for (int r = 0; r < 3; ++r) spent[r] += seconds[c][r] / blocks;
      for (int t = 0; t < 3; ++t) used[t] += bytes[c][t] / blocks;
      place(block + 1, c);
      for (int r = 0; r < 3; ++r) spent[r] -= seconds[c][r] / blocks;
      for (int t = 0; t < 3; ++t) used[t] -= bytes[c][t] / blocks;
    }
  };
  place(0, 0);
  return best;
}

void expect_within(const PlaceNeed& need, const PlaceRates& rates, const std::string& what) {
  const PlacePlan plan = place_plan(need, rates);
  ASSERT_TRUE(plan.fits) << what;
  std::array<double, 3> used = {};
  const double bytes[] = {need.grad, need.master, need.slots};
  const PlaceShares* shares[] = {&plan.grad, &plan.master, &plan.slots};
  for (int k = 0; k < 3; ++k)
    for (int t = 0; t < 3; ++t) {
      EXPECT_GE(share(*shares[k], t), -1e-12) << what;
      used[t] += share(*shares[k], t) * bytes[k] * static_cast<double>(need.numel);
    }
  for (int t = 0; t < 3; ++t)
    EXPECT_LE(used[t], static_cast<double>(need.room[t]) * (1 + 1e-9) + 1) << what << " " << t;
  EXPECT_EQ(plan.seconds, step_seconds(need, rates, plan.grad, plan.master, plan.slots)) << what;
  EXPECT_LE(plan.seconds, 1.05 * swept(need, rates, 5)) << what;
}

TEST(PlacePlan, TakesOneMemoryWhereItIsEnough) {
  PlacePlan plan = place_plan(need_of(14000, kMany, kMany), usual());
  EXPECT_EQ(plan.grad.device() + plan.master.device() + plan.slots.device(), 3.0);
  plan = place_plan(need_of(0, kMany, 0), usual());
  EXPECT_EQ(plan.grad.host + plan.master.host + plan.slots.host, 3.0);
  EXPECT_NEAR(plan.seconds, 1000 * 28 / 20e9, 1e-15) << "the host steps all of it";
}

TEST(PlacePlan, SaysWhatDoesNotFit) {
  EXPECT_FALSE(place_plan(need_of(4000, 5000, 4999), usual()).fits);
  EXPECT_TRUE(place_plan(need_of(4000, 5000, 5000), usual()).fits) << "to the last byte";
}

// Half of the device: the elements that are there are stepped there, and do not travel.
TEST(PlacePlan, KeepsWholeElementsTogetherWhereTheLinkIsSlow) {
  PlaceRates slow = usual();
  slow.to_host = slow.to_device = 1e9;
  const PlacePlan plan = place_plan(need_of(7000, kMany, 0), slow);
  EXPECT_NEAR(plan.grad.host, 0.5, 0.02);
  EXPECT_NEAR(plan.master.host, 0.5, 0.02);
  EXPECT_NEAR(plan.slots.host, 0.5, 0.02);
}

// When the host's memory is full, files hold the elements that are read and written least for their size.
TEST(PlacePlan, PutsLittleIntoSlowFiles) {
  const PlacePlan plan = place_plan(need_of(0, 10000, kMany), usual());
  EXPECT_NEAR(plan.grad.file * 2 + plan.master.file * 4 + plan.slots.file * 8, 4, 0.1) << "no more than there must be";
  PlaceNeed often = need_of(0, 10000, kMany);
  often.accumulation = 16;
  EXPECT_EQ(place_plan(often, usual()).grad.file, 0) << "gradients are read and written in every micro-step";
}

TEST(PlacePlan, IsNearTheBestOfAllWays) {
  std::mt19937 random(7);
  const auto of = [&](double low, double high) { return low * std::pow(high / low, random() / 4294967296.0); };
  for (int i = 0; i < 60; ++i) {
    const double all = 14000;
    const auto room = [&](double part) { return static_cast<int64_t>(std::ceil(part * all)); };
    const double device = of(0.01, 1.2), host = of(0.05, 1.2);
    PlaceNeed need = need_of(room(device), room(host), room(std::max(0.0, 1.01 - device - host) + of(0.01, 1.0)));
    need.accumulation = i % 3 == 0 ? 4 : 1;
    if (i % 4 == 0) need.grad = 4;
    need.room[2] += 2000;
    const PlaceRates rates{of(1e9, 50e9), of(1e9, 50e9), of(2e8, 2e10), of(2e8, 2e10), of(2e9, 2e11), of(1e10, 2e12)};
    expect_within(need, rates, std::to_string(i));
  }
}

TEST(PlacePlan, IsTheSameForEqualArguments) {
  const PlacePlan a = place_plan(need_of(3000, 6000, kMany), usual()),
                  b = place_plan(need_of(3000, 6000, kMany), usual());
  EXPECT_EQ(a.seconds, b.seconds);
  EXPECT_EQ(a.slots.file, b.slots.file);
  EXPECT_EQ(a.slots.host, b.slots.host);
}

}  // namespace
}  // namespace ds::plan
