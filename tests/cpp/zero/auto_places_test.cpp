// What is touched most is nearest to the device, as far as memory reaches; with rates, what takes the least time.
#include "zero/auto_places.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace ds::zero {
namespace {

using storage::Medium;

const StateBytes kNeed{200, 400, 800};

TEST(AutoPlaces, FillsTheDeviceThenTheHostThenFiles) {
  EXPECT_EQ(auto_places(kNeed, {1400, 0, 0, "", false}), Placements{});
  Placements p = auto_places(kNeed, {0, INT64_MAX, 0, "", true});
  EXPECT_EQ(p.grad.rest, Medium::kHost);
  EXPECT_EQ(p.slot.rest, Medium::kHost);
  EXPECT_EQ(p.slot.host_share, 1.0);
  EXPECT_TRUE(p.slot.pinned);
  p = auto_places(kNeed, {300, 300, 800, "/there", false});
  EXPECT_EQ(p.grad, storage::Placement{});
  EXPECT_EQ(p.master.rest, Medium::kHost);
  EXPECT_EQ(p.master.host_share, 0.75);
  EXPECT_EQ(p.slot.rest, Medium::kFile);
  EXPECT_EQ(p.slot.folder, "/there");
  EXPECT_EQ(p.slot.host_share, 1.0);
}

TEST(AutoPlaces, OneKindMayBeInAllMemories) {
  const Placements p = auto_places(kNeed, {700, 200, 500, "/there", true});
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
  const Placements p = auto_places(kNeed, have);
  for (const storage::Placement* place : {&p.grad, &p.master, &p.slot}) {
    EXPECT_EQ(place->rest, Medium::kHost);
    EXPECT_NEAR(place->host_share, 0.5, 0.02);
  }
  have.accumulation = 8;  // gradients travel eight times
  EXPECT_EQ(auto_places(kNeed, have).grad, storage::Placement{});
}

TEST(AutoPlaces, SaysWhatIsMissing) {
  try {
    auto_places(kNeed, {100, 150, 500, "/there", false});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(
        std::string(error.what()).find("zero_optimization.placement: optimizer states of this rank need 800 bytes"), 0u)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("All of its states are 1400 bytes"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace ds::zero
