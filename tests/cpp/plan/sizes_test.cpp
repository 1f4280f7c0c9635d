// Plans from sizes that no machine has: an error, and no plan of other sizes.
#include <gtest/gtest.h>

#include <functional>

#include "base/error.h"
#include "plan/pipe_plan.h"
#include "plan/process_grid.h"
#include "plan/repartition.h"
#include "plan/route_plan.h"
#include "plan/saved_layout.h"
#include "plan/sequence_cut.h"
#include "plan/shard_map.h"

namespace ds::plan {
namespace {

constexpr int64_t kHuge = int64_t{1} << 62;

TEST(PlanSizes, ThatNoIntegerHoldsAreRefused) {
  const std::vector<std::function<void()>> plans = {
      [] {
        flat_shards({kHuge, kHuge}, 2, 2, kHuge, {});
      },
      [] { flat_shards({8}, kHuge, 4, 100, {}); },
      [] {
        param_shards({kHuge, kHuge}, 2, 2, kHuge);
      },
      [] {
        PipeShape{1 << 16, 1 << 16, 4}.check();
      },
      [] { repartition({}, kHuge, 4, 0); },
      [] {
        repartition({{kHuge, kHuge, 0, 0, 0}}, 16, 2, 0);
      },
      [] {
        repartition({{-4, 8, 0, 0, 0}}, 16, 2, 0);
      },
      [] {
        repartition({{0, 8, 7, 0, 0}}, 16, 2, 0);
      },
      [] { SavedLayout::flat({{1}}, {kHuge}, 4, "file"); },
      [] {
        SavedLayout::flat({{kHuge, kHuge}}, {kHuge}, 1, "file");
      },
      [] {
        SavedLayout::flat({{8, -4}}, {8}, 1, "file");
      },
      [] {
        SavedLayout::sliced({4}, {kHuge, kHuge}, 2, "file");
      },
      [] {
        plan_arrivals({1, 2}, kHuge, 4);
      },
      [] {
        SequenceCut({kHuge, kHuge}, {});
      },
      [] {
        ProcessGrid(1 << 16, {{"a", 1 << 16, "a"}, {"b", 1 << 16, "b"}, {"c", 1 << 16, "c"}});
      },
  };
  for (size_t i = 0; i < plans.size(); ++i) EXPECT_THROW(plans[i](), Error) << "plan " << i;
}

}  // namespace
}  // namespace ds::plan
