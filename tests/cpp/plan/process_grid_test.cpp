#include "plan/process_grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "../error_of.h"
#include "base/error.h"

namespace ds::plan {
namespace {

RankList all_ranks(int world) {
  RankList ranks(world);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// `list` in runs of `size`; the members of all runs with the same index.
RankLists runs(const RankList& list, int size) {
  RankLists cut;
  for (size_t i = 0; i < list.size(); ++i) {
    if (i % size == 0) cut.emplace_back();
    cut.back().push_back(list[i]);
  }
  return cut;
}
RankLists strides(const RankList& list, int size) {
  RankLists cut(size);
  for (size_t i = 0; i < list.size(); ++i) cut[i % size].push_back(list[i]);
  return cut;
}

void fold_experts(ProcessGrid& grid, const std::string& name, const Axes& from, int expert, bool data_first) {
  const Axis experts{"ep", expert, "expert_parallel_size"}, copies{"edp", 0, ""};
  grid.fold(name, from, data_first ? std::vector<Axis>{experts, copies} : std::vector<Axis>{copies, experts});
}

struct ExpertLists {
  RankLists experts, copies;
};
ExpertLists expert_lists(int world, int tensor, int expert, int pipeline, bool data_first) {
  ProcessGrid grid(world, {{"pp", pipeline, ""}, {"dp", 0, ""}, {"tp", tensor, ""}});
  fold_experts(grid, "experts", {"dp"}, expert, data_first);
  return {grid.lists({"experts.ep"}), grid.lists({"experts.edp"})};
}

// Every way to cut a world into three sizes.
void for_each_grid(int world, const std::function<void(int, int, int)>& body) {
  for (int a = 1; a <= world; ++a)
    for (int b = 1; world % a == 0 && b <= world / a; ++b)
      if (world / a % b == 0) body(a, b, world / a / b);
}

void expect_partition(const RankLists& lists, int world) {
  RankList seen;
  for (const RankList& list : lists) {
    EXPECT_TRUE(std::is_sorted(list.begin(), list.end()));
    seen.insert(seen.end(), list.begin(), list.end());
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen, all_ranks(world));
}

// The arithmetic of a topology with axes (pipe, data, model): loops over the axes, outer to inner.
TEST(ProcessGrid, ListsOfEveryWorldUpTo64EqualLoops) {
  for (int world = 1; world <= 64; ++world) {
    for_each_grid(world, [world](int pipe, int data, int model) {
      const ProcessGrid grid(world, {{"pipe", pipe, ""}, {"data", data, ""}, {"model", model, ""}});
      const auto at = [&](int p, int d, int m) { return (p * data + d) * model + m; };
      RankLists pipes, datas, models, data_models, pipe_models;
      for (int d = 0; d < data; ++d)
        for (int m = 0; m < model; ++m) {
          pipes.emplace_back();
          for (int p = 0; p < pipe; ++p) pipes.back().push_back(at(p, d, m));
        }
      for (int p = 0; p < pipe; ++p) {
        data_models.emplace_back();
        for (int m = 0; m < model; ++m) {
          datas.emplace_back();
          for (int d = 0; d < data; ++d) datas.back().push_back(at(p, d, m));
        }
        for (int d = 0; d < data; ++d) {
          models.emplace_back();
          for (int m = 0; m < model; ++m) {
            models.back().push_back(at(p, d, m));
            data_models.back().push_back(at(p, d, m));
          }
        }
      }
      for (int d = 0; d < data; ++d) {
        pipe_models.emplace_back();
        for (int p = 0; p < pipe; ++p)
          for (int m = 0; m < model; ++m) pipe_models.back().push_back(at(p, d, m));
      }
      ASSERT_EQ(grid.lists({"pipe"}), pipes);
      ASSERT_EQ(grid.lists({"data"}), datas);
      ASSERT_EQ(grid.lists({"model"}), models);
      ASSERT_EQ(grid.lists({"data", "model"}), data_models);
      ASSERT_EQ(grid.lists({"model", "pipe"}), pipe_models);
      ASSERT_EQ(grid.lists({"pipe", "data", "model"}), RankLists{all_ranks(world)});
      ASSERT_EQ(grid.lists({}).size(), static_cast<size_t>(world));
      for (int p = 0; p < pipe; ++p)
        for (int d = 0; d < data; ++d)
          for (int m = 0; m < model; ++m) {
            const int rank = at(p, d, m);
            ASSERT_EQ(grid.coordinate("pipe", rank), p);
            ASSERT_EQ(grid.coordinate("data", rank), d);
            ASSERT_EQ(grid.coordinate("model", rank), m);
            ASSERT_EQ(grid.index({"data"}, rank), d);
            ASSERT_EQ(grid.index({"data", "model"}, rank), d * model + m);
            ASSERT_EQ(grid.list({"data"}, rank)[d], rank);
            ASSERT_EQ(grid.list({}, rank), RankList{rank});
          }
    });
  }
}

TEST(ProcessGrid, SizesThatAreLeftOpen) {
  const ProcessGrid grid(24, {{"pp", 2, ""}, {"dp", 0, ""}, {"sp", 3, ""}, {"tp", 2, ""}});
  EXPECT_EQ(grid.size({"dp"}), 2);
  EXPECT_EQ(grid.size({"dp", "sp"}), 6);
  EXPECT_EQ(grid.size({}), 1);
  EXPECT_EQ(grid.list({"dp"}, 13), (RankList{13, 19}));
}

// dp x sp as edp x ep, for every world: the published lists, written with loops.
TEST(ProcessGrid, ExpertsOfEveryWorldUpTo64EqualLoops) {
  for (int world = 1; world <= 64; ++world) {
    for_each_grid(world, [world](int pipe, int data, int tensor) {
      for (int expert = 1; expert <= data; ++expert) {
        if (data % expert != 0) continue;
        for (bool data_first : {false, true}) {
          RankLists experts, copies;
          const int count = data / expert;
          for (int p = 0; p < pipe; ++p)
            for (int t = 0; t < tensor; ++t) {
              const auto at = [&](int d) { return (p * data + d) * tensor + t; };
              for (int c = 0; c < count; ++c) {
                experts.emplace_back();
                for (int e = 0; e < expert; ++e)
                  experts.back().push_back(at(data_first ? e * count + c : c * expert + e));
              }
              for (int e = 0; e < expert; ++e) {
                copies.emplace_back();
                for (int c = 0; c < count; ++c)
                  copies.back().push_back(at(data_first ? e * count + c : c * expert + e));
              }
            }
          const ExpertLists lists = expert_lists(world, tensor, expert, pipe, data_first);
          ASSERT_EQ(lists.experts, experts) << world << " " << tensor << " " << expert << " " << pipe << data_first;
          ASSERT_EQ(lists.copies, copies) << world << " " << tensor << " " << expert << " " << pipe << data_first;
        }
      }
    });
  }
}

TEST(ProcessGrid, PublishedListsOfExperts) {
  auto lists = expert_lists(16, 2, 4, 1, false);
  EXPECT_EQ(lists.experts, (RankLists{{0, 2, 4, 6}, {8, 10, 12, 14}, {1, 3, 5, 7}, {9, 11, 13, 15}}));
  EXPECT_EQ(lists.copies, (RankLists{{0, 8}, {2, 10}, {4, 12}, {6, 14}, {1, 9}, {3, 11}, {5, 13}, {7, 15}}));
  lists = expert_lists(8, 1, 4, 1, true);
  EXPECT_EQ(lists.experts, (RankLists{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(lists.copies, (RankLists{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
}

// Experts may be shared by ranks that split sequences: neighbours, whatever the size of sp.
TEST(ProcessGrid, AFoldOfTwoAxesAndSeveralFolds) {
  ProcessGrid grid(16, {{"pp", 2, ""}, {"dp", 2, ""}, {"sp", 2, ""}, {"tp", 2, ""}});
  fold_experts(grid, "ep_size_4", {"dp", "sp"}, 4, false);
  fold_experts(grid, "ep_size_2", {"dp", "sp"}, 2, false);
  EXPECT_EQ(grid.list({"ep_size_4.ep"}, 3), (RankList{1, 3, 5, 7}));
  EXPECT_EQ(grid.list({"ep_size_4.edp"}, 3), (RankList{3}));
  EXPECT_EQ(grid.list({"ep_size_2.ep"}, 3), (RankList{1, 3}));
  EXPECT_EQ(grid.list({"ep_size_2.edp"}, 3), (RankList{3, 7}));
  EXPECT_EQ(grid.list({"ep_size_2.edp", "tp"}, 3), (RankList{2, 3, 6, 7}));
  EXPECT_EQ(grid.list({"ep_size_2.edp", "pp"}, 3), (RankList{3, 7, 11, 15}));
  for (const char* axis : {"ep_size_4.ep", "ep_size_2.edp", "ep_size_2.ep"}) expect_partition(grid.lists({axis}), 16);
  EXPECT_EQ(error_of([&] {
              grid.list({"ep_size_2.edp", "dp"}, 0);
            }),
            "the axes ep_size_2.edp, dp overlap: an axis and what it was split or folded into do not go together; ask "
            "for one of them");
  EXPECT_EQ(error_of([&] {
              fold_experts(grid, "ep_size_3", {"dp", "sp"}, 3, false);
            }),
            "expert_parallel_size 3 does not divide the 4 data-parallel ranks: use one of 1, 2, 4");
  EXPECT_EQ(error_of([&] { fold_experts(grid, "ep_size_2", {"dp"}, 2, false); }),
            "the axis ep_size_2.edp exists already: give it another name");
}

TEST(ProcessGrid, SplitsOfOneAxisStandSideBySide) {
  for (int world : {4, 8, 12, 24, 64}) {
    for (int tensor : {1, 2}) {
      ProcessGrid grid(world, {{"dp", 0, ""}, {"tp", tensor, ""}});
      grid.fold("dp", {"dp"}, {{"replicas", 0, ""}, {"mics", 2, "zero_optimization.mics_shard_size"}});
      grid.fold("dp", {"dp"}, {{"hosts", 2, ""}, {"host", 0, ""}});
      for (int rank = 0; rank < world; ++rank) {
        const RankList along = grid.list({"dp"}, rank);
        const int d = rank / tensor;
        EXPECT_EQ(grid.list({"dp.mics"}, rank), runs(along, 2)[d / 2]);
        EXPECT_EQ(grid.list({"dp.replicas"}, rank), strides(along, 2)[d % 2]);
        EXPECT_EQ(grid.list({"dp.host"}, rank), runs(along, static_cast<int>(along.size()) / 2)[2 * d / along.size()]);
        EXPECT_EQ(grid.list({"dp.mics", "dp.replicas"}, rank), along);
      }
    }
  }
  ProcessGrid grid(8, {{"dp", 8, ""}});
  grid.fold("dp", {"dp"}, {{"outer", 2, ""}, {"inner", 4, ""}});
  grid.fold("dp.inner", {"dp.inner"}, {{"outer", 2, ""}, {"inner", 2, ""}});
  EXPECT_EQ(grid.list({"dp.inner.outer"}, 5), (RankList{5, 7}));
  EXPECT_EQ(grid.list({"dp.outer", "dp.inner.inner"}, 5), (RankList{0, 1, 4, 5}));
  EXPECT_EQ(error_of([&] {
              grid.fold("dp", {"dp"}, {{"replicas", 0, ""}, {"mics", 3, "zero_optimization.mics_shard_size"}});
            }),
            "zero_optimization.mics_shard_size 3 does not divide the 8 data-parallel ranks: use one of 1, 2, 4, 8");
}

TEST(ProcessGrid, ErrorsNameKeySizeAndFix) {
  const auto grid = [](int world, std::vector<Axis> axes) { return error_of([&] { ProcessGrid(world, axes); }); };
  EXPECT_EQ(grid(16, {{"pp", 3, "pipeline_parallel_size"}, {"dp", 0, ""}, {"tp", 2, ""}}),
            "pipeline_parallel_size 3 does not divide the 16 ranks: use one of 1, 2, 4, 8, 16");
  EXPECT_EQ(
      grid(4, {{"dp", 4, "data_parallel_size"}, {"tp", 2, "tensor_model_parallel_size"}}),
      "data_parallel_size 4 x tensor_model_parallel_size 2 is not the 4 ranks there are; leave data_parallel_size "
      "out, or give 2");
  EXPECT_EQ(grid(8, {{"dp", 2, ""}, {"tp", -1, ""}}), "tp -1 does not divide the 8 ranks: use one of 1, 2, 4, 8");
  EXPECT_EQ(grid(8, {{"dp", 0, ""}, {"tp", 0, ""}}),
            "the sizes of the axes dp and tp are both left open: give one of them");
  EXPECT_EQ(grid(4, {{"dp", 2, ""}, {"dp", 2, ""}}), "the axis dp is given twice: give each axis a name of its own");
  EXPECT_EQ(grid(0, {}), "a job of 0 ranks has no grid: it needs at least one rank");
  EXPECT_EQ(error_of([] { ProcessGrid(2, {{"dp", 2, ""}}).list({"ep"}, 0); }), "there is no axis ep: the grid has dp");
  EXPECT_EQ(error_of([] {
              ProcessGrid(2, {{"dp", 2, ""}}).list({"dp"}, 2);
            }),
            "rank 2 is not in the job: its ranks are 0 to 1");
}

// An axis that this tree has never heard of needs no line in it.
TEST(ProcessGrid, AnAxisOfSomebodyElse) {
  ProcessGrid grid(12, {{"pp", 1, ""}, {"dp", 0, ""}, {"branch", 3, "train_branches"}, {"tp", 2, ""}});
  EXPECT_EQ(grid.list({"branch"}, 7), (RankList{7, 9, 11}));
  EXPECT_EQ(grid.list({"dp"}, 7), (RankList{1, 7}));
  fold_experts(grid, "ep_size_6", {"dp", "branch"}, 6, false);
  EXPECT_EQ(grid.list({"ep_size_6.ep"}, 1), (RankList{1, 3, 5, 7, 9, 11}));
}

}  // namespace
}  // namespace ds::plan
