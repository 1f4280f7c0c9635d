// docs/adding.md, "A memory tier", walked: a tier that nobody lists, in a file of its own.

#include <algorithm>

#include "../error_of.h"
#include "planes.h"
#include "storage/tier.h"

namespace ds::storage {
namespace {

// Keeps blocks upside down, which nobody notices.
class ToyPart : public Part {
 public:
  explicit ToyPart(const PartSpec& spec) {
    for (const int64_t bytes : spec.block_bytes) blocks_.emplace_back(static_cast<size_t>(bytes), '\0');
  }
  void read(size_t block, char* data) override {
    std::reverse_copy(blocks_[block].begin(), blocks_[block].end(), data);
  }
  void write(size_t block, char* data) override {
    std::string& kept = blocks_[block];
    std::reverse_copy(data, data + kept.size(), kept.begin());
  }

 private:
  std::vector<std::string> blocks_;
};

class ToyTier : public Tier {
 public:
  std::unique_ptr<Part> open(const PartSpec& spec) override { return std::make_unique<ToyPart>(spec); }
};

std::unique_ptr<Tier> make_toy_tier(const TierContext& context) { return std::make_unique<ToyTier>(); }
const TierRegistration toy_registration("toy", &make_toy_tier);

TEST(AToyTier, IsATierLikeTheOthers) {
  const Medium toy = medium_named("toy");
  EXPECT_EQ(toy, static_cast<Medium>(3));
  EXPECT_EQ(name_of(toy), "toy");
  EXPECT_EQ(medium_named("host"), Medium::kHost);
  EXPECT_TRUE(says(error_of([] { medium_named("tape"); }), "no memory tier 'tape'; there are device, host, file, toy"));
  Budget budget;
  budget.bytes[toy] = 20000;
  ShardStorage storage(c10::Device(at::kCPU), budget);
  const PlaneId plane = storage.add("x", 5000, at::kFloat, at_rest(toy), {1000, 5000});
  write_plane(storage, plane, {0, 5000}, 3);
  storage.prefetch(plane, {1000, 5000}, Medium::kDevice);
  EXPECT_TRUE(plane_holds(storage, plane, {1000, 5000}, 1003, Medium::kDevice));
  storage.move(plane, at_rest(Medium::kDevice));
  EXPECT_TRUE(holds(storage.resident(plane), 3));
  storage.move(plane, at_rest(toy));
  EXPECT_TRUE(plane_holds(storage, plane, {0, 5000}, 3));
  const Usage usage = storage.usage();
  EXPECT_EQ(usage[3].name, "toy");
  EXPECT_EQ(usage[3].resting, 20000);
  EXPECT_EQ(usage[3].over_budget, 0);
  storage.add("y", 1, at::kFloat, at_rest(toy));
  EXPECT_EQ(storage.usage()[3].over_budget, 1);
  EXPECT_TRUE(says(error_of([&] { storage.scratch(1, at::kFloat, toy); }), "nobody can work in the tier 'toy'"));
}

}  // namespace
}  // namespace ds::storage
