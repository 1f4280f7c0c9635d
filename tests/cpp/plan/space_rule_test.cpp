// The rules of spaces over many grids, without a communicator: which rank owns what, and that every element counts once
// in the norm, whoever holds copies of it.
#include "plan/spaces/space_rule.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <set>

#include "../error_of.h"
#include "../every_case.h"
#include "base/error.h"

namespace ds::plan {
namespace {

// Parameters along an axis that cuts the model: every rank has others, or all have the same.
enum class Along { kOthers, kCopies };

struct Case {
  int pp, dp, sp, tp;
  std::string rule;
  bool shards;
  Along slices, stages;
  int expert = 1;     // ranks that share experts
  bool wide = false;  // the tensor-parallel ranks are among them
  int mics = 0;       // ranks that share one copy; 0: no MiCS
  int inner = 0;      // those of them that have a second copy together; 0: there is none

  int world() const { return pp * dp * sp * tp; }
  ProcessGrid grid() const {
    ProcessGrid made(world(), {{"pp", pp, ""}, {"dp", dp, ""}, {"sp", sp, ""}, {"tp", tp, ""}});
    const Axes line = wide ? Axes{"dp", "sp", "tp"} : same_weights();
    if (rule == "experts") made.fold("experts", line, {{"edp", 0, ""}, {"ep", expert, ""}});
    if (mics > 0) made.fold("dp", same_weights(), {{"replicas", 0, ""}, {"mics", mics, ""}});
    if (inner > 0)
      made.fold("hpz", same_weights(), {{"copies", 0, ""}, {"groups", mics / inner, ""}, {"inner", inner, ""}});
    return made;
  }
  std::string text() const {
    std::string all = rule + (shards ? " sharded" : " whole") + (wide ? " wide" : "") + ":";
    for (int one : {pp, dp, sp, tp, static_cast<int>(slices), static_cast<int>(stages), expert, mics})
      all += " " + std::to_string(one);
    return all;
  }
};

// The sums of squares that all ranks end with, where element number i has the square 2^-i of a fixed random order.
void check(const Case& c) {
  SCOPED_TRACE(c.text());
  const ProcessGrid grid = c.grid();
  const bool experts = c.rule == "experts";
  std::map<std::vector<int>, uint64_t> squares;  // by where an element is in the model, and in its shard
  std::mt19937_64 random(7);
  std::vector<uint64_t> sums(c.world());
  std::vector<SpaceAxes> answers;
  for (int rank = 0; rank < c.world(); ++rank) {
    const int stage = grid.coordinate("pp", rank), slice = grid.coordinate("tp", rank);
    SpaceQuery query{grid, c.rule, c.shards};
    if (c.stages == Along::kCopies && stage > 0) query.copied_along = "pp";
    if (c.slices == Along::kCopies && slice > 0) query.copied_along = "tp";
    answers.push_back(space_axes(query));
    const SpaceAxes& axes = answers.back();
    const bool holds_other_slice = c.slices == Along::kOthers && !c.wide;
    const std::vector<int> element{c.stages == Along::kCopies ? 0 : stage, holds_other_slice ? slice : 0,
                                   experts ? grid.coordinate("experts.ep", rank) : 0, grid.index(axes.shard, rank)};
    if (!squares.count(element)) squares[element] = random();
    bool counts = true;
    for (const NormAxes& norm : axes.norm_over) counts = counts && norm.first;
    if (counts) sums[rank] = squares[element];
  }
  const SpaceAxes& first = answers.front();
  EXPECT_EQ(grid.size(first.shard) * grid.size(first.replicas),
            experts ? grid.size({"experts.edp"}) : c.dp * c.sp);  // together they train it
  for (const SpaceAxes& axes : answers) {
    ASSERT_EQ(axes.shard, first.shard);
    ASSERT_EQ(axes.replicas, first.replicas);
    ASSERT_EQ(axes.purpose, first.purpose);
    ASSERT_EQ(axes.norm_over.size(), first.norm_over.size());
    for (size_t i = 0; i < axes.norm_over.size(); ++i) ASSERT_EQ(axes.norm_over[i].axes, first.norm_over[i].axes);
  }
  for (const NormAxes& norm : first.norm_over) {
    std::vector<uint64_t> added(c.world());
    for (const RankList& list : grid.lists(norm.axes)) {
      uint64_t sum = 0;
      for (int rank : list) sum += sums[rank];
      for (int rank : list) added[rank] = sum;
    }
    sums = added;
  }
  uint64_t all = 0;
  for (const auto& [element, square] : squares) all += square;
  for (int rank = 0; rank < c.world(); ++rank) ASSERT_EQ(sums[rank], all) << "rank " << rank;
}

// Every rule over a grid of these sizes.
void check_rules(int pp, int dp, int sp, int tp, const std::function<bool(int size)>& tries) {
  for (bool shards : {false, true})
    for (Along slices : {Along::kOthers, Along::kCopies})
      for (Along stages : {Along::kOthers, Along::kCopies}) {
        if ((tp == 1 && slices == Along::kCopies) || (pp == 1 && stages == Along::kCopies)) continue;
        // One that is copied along both axes is copied by the first slice of a later stage, too.
        if (slices == Along::kCopies && stages == Along::kCopies) continue;
        check({pp, dp, sp, tp, "dense", shards, slices, stages});
        for (int mics = 1; shards && mics <= dp * sp; ++mics)
          if (dp * sp % mics == 0 && tries(mics))
            check({pp, dp, sp, tp, "dense", true, slices, stages, 1, false, mics});
        for (bool wide : {false, true}) {
          const int among = dp * sp * (wide ? tp : 1);
          if (wide && (tp == 1 || slices == Along::kCopies)) continue;
          for (int expert = 1; expert <= among; ++expert)
            if (among % expert == 0 && tries(expert))
              check({pp, dp, sp, tp, "experts", shards, slices, stages, expert, wide});
        }
      }
}

TEST(SpaceRules, EachElementCountsOnceOnAllGridsOfSixteenRanks) {
  for (int world = 1; world <= 16; ++world)
    for (int pp = 1; pp <= world; ++pp)
      for (int sp = 1; world % pp == 0 && sp <= world / pp; ++sp)
        for (int tp = 1; world / pp % sp == 0 && tp <= world / pp / sp; ++tp)
          if (world / pp / sp % tp == 0) check_rules(pp, world / pp / sp / tp, sp, tp, [](int) { return true; });
}

TEST(SpaceRules, EachElementCountsOnceOnLargerGrids) {
  std::mt19937 random(3);
  const int grids = cases_of("DS_GRID_CASES", 3000, 150);
  for (int i = 0; i < grids; ++i) {
    const auto size = [&](int most) { return 1 + static_cast<int>(random() % most); };
    const int pp = size(6), sp = size(4), tp = size(4);
    check_rules(pp, size(std::max(1, 256 / (pp * sp * tp))), sp, tp, [&](int) { return random() % 4 == 0; });
  }
}

TEST(SpaceRules, MicsIsASplitOfTheDenseRule) {
  const ProcessGrid grid = Case{1, 4, 2, 1, "dense", true, Along::kOthers, Along::kOthers, 1, false, 4}.grid();
  const SpaceAxes axes = space_axes({grid, "dense", true});
  EXPECT_EQ(grid.list(axes.shard, 5), (RankList{4, 5, 6, 7}));
  EXPECT_EQ(grid.list(axes.replicas, 5), (RankList{1, 5}));
  EXPECT_EQ(axes.way, "");  // "replicas" takes every bucket that has some
  EXPECT_TRUE(axes.inner.empty() && axes.outer.empty());
}

TEST(SpaceRules, ASecondCopyIsInsideOneCopy) {
  for (int mics : {0, 4}) {
    const int inner = mics > 0 ? 2 : 0;
    const Case c{1, 4, 2, 1, "dense", true, Along::kOthers, Along::kOthers, 1, false, mics, inner};
    ProcessGrid grid = c.grid();
    if (mics == 0) grid.fold("hpz", same_weights(), {{"groups", 0, ""}, {"inner", 2, ""}});
    const SpaceAxes axes = space_axes({grid, "dense", true});
    EXPECT_EQ(grid.list(axes.inner, 5), (RankList{4, 5}));
    EXPECT_EQ(grid.list(axes.outer, 5), mics > 0 ? (RankList{5, 7}) : (RankList{1, 3, 5, 7}));
  }
}

TEST(SpaceRules, ErrorsNameRuleAndAxis) {
  const ProcessGrid grid = Case{1, 4, 1, 1, "dense", true, Along::kOthers, Along::kOthers}.grid();
  EXPECT_EQ(error_of([&] {
              space_axes({grid, "none such", true});
            }),
            "there is no rule 'none such' for the ranks of a parameter; the rules are: dense, experts, mics");
  EXPECT_EQ(error_of([&] {
              space_axes({grid, "experts", true});
            }),
            "there is no axis experts.edp: the grid has dp, pp, sp, tp");
  EXPECT_EQ(error_of([&] {
              space_axes({grid, "dense", true, "dp"});
            }),
            "a parameter is copied along the axis 'dp'; 'tp' and 'pp' are known");
}

}  // namespace
}  // namespace ds::plan
