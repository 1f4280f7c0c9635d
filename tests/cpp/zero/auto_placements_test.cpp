// Elements that are touched most are nearest to the device, as far as memory reaches; with rates, the placement takes
// the least time.
#include "zero/offload/auto_placements.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "../error_of.h"
#include "base/error.h"
#include "optim/rule.h"
#include "small_engine.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

using storage::Medium;

const StateBytes kNeed{200, 400, 800};

TEST(AutoPlaces, FillsTheDeviceThenTheHostThenFiles) {
  EXPECT_EQ(auto_placements(kNeed, {1400, 0, 0, "", false}), Placements{});
  Placements p = auto_placements(kNeed, {0, INT64_MAX, 0, "", true});
  EXPECT_EQ(p.grad.rest, Medium::kHost);
  EXPECT_EQ(p.slot.rest, Medium::kHost);
  EXPECT_EQ(p.slot.host_share, 1.0);
  EXPECT_TRUE(p.slot.pinned);
  p = auto_placements(kNeed, {300, 300, 800, "/there", false});
  EXPECT_EQ(p.grad, storage::Placement{});
  EXPECT_EQ(p.master.rest, Medium::kHost);
  EXPECT_EQ(p.master.host_share, 0.75);
  EXPECT_EQ(p.slot.rest, Medium::kFile);
  EXPECT_EQ(p.slot.folder, "/there");
  EXPECT_EQ(p.slot.host_share, 1.0);
}

TEST(AutoPlaces, OneKindMayBeInAllMemories) {
  const Placements p = auto_placements(kNeed, {700, 200, 500, "/there", true});
  EXPECT_EQ(p.grad, storage::Placement{});
  EXPECT_EQ(p.master, storage::Placement{});
  EXPECT_EQ(p.slot.rest, Medium::kHost);
  EXPECT_EQ(p.slot.work, Medium::kDevice);
  EXPECT_TRUE(p.slot.pinned && p.slot.in_files());
  EXPECT_EQ(p.slot.folder, "/there");
  EXPECT_EQ(p.slot.host_share, 0.25);
  EXPECT_EQ(p.slot.file_share, 0.625);
}

TEST(AutoPlaces, RatesDecide) {
  TierBytes have{700, INT64_MAX, 0, "", false};
  have.rates = {1, 1, 0, 0, 100, 100};  // a slow link: elements that are on the device are there as a whole
  const Placements p = auto_placements(kNeed, have);
  for (const storage::Placement* placement : {&p.grad, &p.master, &p.slot}) {
    EXPECT_EQ(placement->rest, Medium::kHost);
    EXPECT_NEAR(placement->host_share, 0.5, 0.02);
  }
  have.accumulation = 8;  // gradients travel eight times
  EXPECT_EQ(auto_placements(kNeed, have).grad, storage::Placement{});
}

TEST(AutoPlaces, SaysWhatIsMissing) {
  const std::string text = error_of([] { auto_placements(kNeed, {100, 150, 500, "/there", false}); });
  EXPECT_EQ(text.find("zero_optimization.placement: optimizer states of this rank need 800 bytes"), 0u) << text;
  EXPECT_TRUE(says(text, "All of its states are 1400 bytes"));
}

// An engine counts the states of each group's rule, and none where the optimizer keeps its own.
TEST(AutoPlaces, CountsTheStatesOfTheRule) {
  const int64_t numel = 3 * 64;
  const auto fits = [&](const OptimizerRules& rules, int64_t bytes) {
    std::vector<ParamSpec> specs;
    for (int32_t group = 0; group < 2; ++group) {
      const at::Tensor weight = at::zeros({numel}, at::kBFloat16).set_requires_grad(true);
      specs.push_back({weight, "w" + std::to_string(group), group, group});
    }
    EngineOptions options;
    options.policy = stage_policy(2);
    options.rules = rules;
    options.memory = TierBytes{0, bytes, 0, "", false};
    options.memory->rates.host_step = 1;  // nobody measures
    try {
      engine_of(specs, options);
      return true;
    } catch (const Error& error) {
      EXPECT_TRUE(says(error.what(), "zero_optimization.placement: "));
      return false;
    }
  };
  const optim::Rule *adam = &optim::find_rule("adam"), *lion = &optim::find_rule("lion"),
                    *adagrad = &optim::find_rule("adagrad"), *lamb = &optim::find_rule("lamb"),
                    *muon = &optim::find_rule("muon"), *own = nullptr;
  for (const auto& [rules, states] : std::vector<std::pair<OptimizerRules, int64_t>>{{{adam, adam}, 4},
                                                                                     {{lamb, lion}, 3},
                                                                                     {{adagrad, lion}, 2},
                                                                                     {{muon, adam}, 3},
                                                                                     {{own, lion}, 1},
                                                                                     {{own, own}, 0},
                                                                                     {{}, 4}}) {
    const int64_t bytes = numel * (2 * (2 + 4) + 4 * states);  // gradients and masters of both groups
    EXPECT_TRUE(fits(rules, bytes)) << states;
    EXPECT_FALSE(fits(rules, bytes - 1)) << states;
  }
}

}  // namespace
}  // namespace ds::zero
