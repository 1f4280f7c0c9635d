#include "comm/process_mesh.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "../error_of.h"
#include "../every_case.h"
#include "base/error.h"
#include "thread_job.h"

namespace ds::comm {
namespace {

int64_t sum_over(Communicator& communicator, int rank) {
  at::Tensor value = at::full({1}, rank, at::kLong);
  communicator.all_reduce(value, ReduceOp::kSum)->wait();
  return value.item<int64_t>();
}

plan::ProcessGrid grid_of(int world, int pp, int sp, int tp) {
  return {world, {{"pp", pp, ""}, {"dp", 0, ""}, {"sp", sp, ""}, {"tp", tp, ""}}};
}

// A tensor that is exchanged over any axis and every split and fold reaches the ranks that the grid names, and no
// others.
TEST(ProcessMesh, CommunicatorsReachTheRanksOfTheirAxes) {
  for (int world : {1, 2, 3, 4, 6, 8, 12}) {
    on_ranks_of_job(world, [world](int rank, const JobPtr& job) {
      const int tp = world % 2 == 0 ? 2 : 1;
      ProcessMesh mesh(grid_of(world, 1, 1, tp), job);
      const int dp = mesh.size({"dp"}), shard = dp % 2 == 0 ? 2 : 1;
      mesh.fold("dp", {"dp"}, {{"replicas", 0, ""}, {"mics", shard, ""}});
      mesh.fold("ep_size_2", {"dp", "sp"}, {{"edp", 0, ""}, {"ep", shard, ""}});
      for (const Axes& axes : {Axes{"pp"}, Axes{"dp"}, Axes{"sp"}, Axes{"tp"}, Axes{"dp", "tp"}, Axes{"dp.mics"},
                               Axes{"dp.replicas"}, Axes{"ep_size_2.edp"}, Axes{"ep_size_2.ep"}}) {
        const SubMesh members = mesh.sub(axes);
        int64_t expected = 0;
        for (int other : members.ranks) expected += other;
        ASSERT_EQ(members.ranks[members.rank], rank);
        for (Purpose purpose : {Purpose::kReduce, Purpose::kGather}) {
          const auto communicator = mesh.communicator(members, purpose);
          ASSERT_EQ(communicator->size(), members.size());
          ASSERT_EQ(communicator->rank(), members.rank);
          ASSERT_EQ(sum_over(*communicator, rank), expected);
        }
      }
    });
  }
}

TEST(ProcessMesh, OneCommunicatorForEachSetOfRanksAndPurpose) {
  Meeting meeting;
  const auto job = job_of(1, 4, meeting);
  ProcessMesh mesh(grid_of(4, 1, 1, 2), job);
  const SubMesh data = mesh.sub({"dp"});
  const auto reduce = mesh.communicator(data, Purpose::kReduce);
  EXPECT_EQ(meeting.openings, 1);  // made when asked for, not before
  EXPECT_EQ(mesh.communicator(data, Purpose::kReduce), reduce);
  EXPECT_NE(mesh.communicator(data, Purpose::kGather), reduce);
  EXPECT_EQ(mesh.communicator(mesh.sub({"sp", "dp"}), Purpose::kReduce), reduce);  // the same ranks
  EXPECT_EQ(mesh.communicator(mesh.sub({}), Purpose::kReduce)->size(), 1);
  EXPECT_EQ(meeting.openings, 2);  // one rank alone meets nobody
  ProcessMesh another(grid_of(4, 1, 1, 2), job);
  EXPECT_NE(another.communicator(data, Purpose::kReduce), reduce);  // of another engine
  EXPECT_EQ(meeting.keys(), (std::vector<std::string>{"mesh/gather/1,3/0", "mesh/reduce/1,3/0", "mesh/reduce/1,3/1"}));
}

// Two purposes of the same ranks: the calls of one never meet those of the other, in whatever order they come.
TEST(ProcessMesh, PurposesDoNotMeet) {
  on_ranks_of_job(2, [](int rank, const JobPtr& job) {
    ProcessMesh mesh(grid_of(2, 1, 1, 1), job);
    const SubMesh data = mesh.sub({"dp"});
    const auto reduce = mesh.communicator(data, Purpose::kReduce), gather = mesh.communicator(data, Purpose::kGather);
    for (int round = 0; round < 200; ++round) {
      int64_t reduced = 0, gathered = 0;
      std::thread other([&] { gathered = sum_over(*gather, 10 * rank + round); });
      reduced = sum_over(*reduce, rank + round);
      other.join();
      ASSERT_EQ(reduced, 1 + 2 * round);
      ASSERT_EQ(gathered, 10 + 2 * round);
    }
  });
}

// Ranks open the communicators of random engines, each rank those it is in: members come in one order and never wait
// for anybody else.
TEST(ProcessMesh, OnlyMembersTakePart) {
  on_ranks_of_job(6, [](int rank, const JobPtr& job) {
    for (int engine = 0; engine < 20; ++engine) {
      if (rank % 3 == 2 && engine % 2 == 1) continue;  // these two ranks have fewer engines
      auto mesh = ProcessMesh::adopt({{"dp", {rank % 3, rank % 3 + 3}}}, job);
      ASSERT_EQ(sum_over(*mesh->communicator(mesh->sub({"dp"}), Purpose::kReduce), rank), 2 * (rank % 3) + 3);
    }
  });
}

TEST(ProcessMesh, AdoptedListsInAnyOrderCanBeSplit) {
  on_ranks_of_job(6, [](int rank, const JobPtr& job) {
    const std::vector<int> even{4, 2, 0, 1}, odd{5, 3};  // in an order of their own, of unequal sizes
    const auto& own = std::find(even.begin(), even.end(), rank) != even.end() ? even : odd;
    const auto mesh = ProcessMesh::adopt({{"dp", own}}, job);
    ASSERT_EQ(mesh->sub({"dp"}).ranks, own);
    ASSERT_EQ(own[mesh->rank({"dp"})], rank);
    mesh->fold("dp", {"dp"}, {{"replicas", 0, ""}, {"mics", 2, ""}});
    const SubMesh shard = mesh->sub({"dp.mics"}), copies = mesh->sub({"dp.replicas"});
    if (rank == 0) {
      EXPECT_EQ(shard.ranks, (std::vector<int>{0, 1}));
      EXPECT_EQ(copies.ranks, (std::vector<int>{4, 0}));
      EXPECT_EQ(copies.rank, 1);
    }
    int64_t expected = 0;
    for (int other : shard.ranks) expected += other;
    EXPECT_EQ(sum_over(*mesh->communicator(shard, Purpose::kGather), rank), expected);
    EXPECT_EQ(mesh->communicator(copies, Purpose::kReduce)->rank(), copies.rank);
    mesh->fold("ep_size_2", {"dp", "sp"}, {{"edp", 0, ""}, {"ep", 2, ""}});
    EXPECT_EQ(mesh->sub({"ep_size_2.ep"}).ranks, shard.ranks);
    for (const char* axis : {"pp", "sp", "tp"}) EXPECT_EQ(mesh->sub({axis}).ranks, std::vector<int>{rank}) << axis;
    EXPECT_TRUE(says(error_of([&] { mesh->sub({"cp"}); }), "there is no axis cp"));
    EXPECT_TRUE(says(error_of([&] {
                       mesh->fold("dp", {"dp"}, {{"replicas", 0, ""}, {"x", 2, ""}});
                     }),
                     "dp.replicas exists already"));
    EXPECT_TRUE(says(error_of([&] {
                       mesh->fold("dp", {"dp"}, {{"a", 0, ""}, {"b", 3, "mics_shard_size"}});
                     }),
                     "mics_shard_size 3 does not divide the"));
  });
}

// Ranks that share sequences train the same weights; what the lists leave of the job does not.
TEST(ProcessMesh, AdoptedListsHaveFourAxes) {
  on_ranks_of_job(8, [](int rank, const JobPtr& job) {
    const auto grid = grid_of(8, 1, 2, 2);
    const auto own = [&](const Axes& axes) { return grid.list(axes, rank); };
    const auto mesh = ProcessMesh::adopt({{"dp", own({"dp"})}, {"sp", own({"sp"})}, {"dp,sp", own({"dp", "sp"})}}, job);
    EXPECT_EQ(mesh->sub({"dp", "sp"}).ranks, own({"dp", "sp"}));
    EXPECT_EQ(mesh->size({"pp"}) * mesh->size({"dp"}) * mesh->size({"sp"}) * mesh->size({"tp"}), 4);
    const auto strided = ProcessMesh::adopt({{"dp", own({"dp"})}}, job);
    EXPECT_EQ(strided->size({"sp"}), 1);
    EXPECT_EQ(strided->sub({"dp", "sp"}).ranks, own({"dp"}));
    const auto refused = [&](const std::map<std::string, std::vector<int>>& lists) {
      return says(error_of([&] { ProcessMesh::adopt(lists, job); }),
                  "the groups of rank " + std::to_string(rank) + " form no grid: dp [");
    };
    // Both lists are of a grid, the third has another order, too few ranks, or is left out.
    std::vector<int> joint = own({"dp", "sp"});
    std::reverse(joint.begin(), joint.end());
    EXPECT_TRUE(refused({{"dp", own({"dp"})}, {"sp", own({"sp"})}, {"dp,sp", joint}}));
    EXPECT_TRUE(refused({{"dp", own({"dp"})}, {"sp", own({"sp"})}, {"dp,sp", {rank}}}));
    EXPECT_TRUE(refused({{"dp", own({"dp"})}, {"sp", own({"sp"})}}));
    EXPECT_TRUE(refused({{"dp", {rank, (rank + 1) % 8}}, {"tp", {rank, (rank + 1) % 8}}}));    // one rank at two places
    EXPECT_TRUE(refused({{"dp", {0, 1, 2, 3, 4, 5, 6, 7}}, {"tp", {rank, (rank + 1) % 8}}}));  // 16 of 8 ranks
  });
}

// An mpu names the ranks along one axis at a time. Those that differ along several are known where ranks are numbered
// row by row.
TEST(ProcessMesh, AdoptedListsNameRanksAlongOneAxis) {
  on_ranks_of_job(8, [](int rank, const JobPtr& job) {
    const auto grid = grid_of(8, 2, 1, 2);
    const auto own = [&](const Axes& axes) { return grid.list(axes, rank); };
    const auto mesh = ProcessMesh::adopt({{"dp", own({"dp"})}, {"tp", own({"tp"})}}, job);
    EXPECT_EQ(mesh->sub({"dp", "sp", "tp"}).ranks, own({"dp", "tp"}));
    // Every second rank comes first: no row of neighbours.
    const int first = rank / 4 * 4, tp = rank % 4 / 2, dp = rank % 2;
    const auto odd =
        ProcessMesh::adopt({{"dp", {first + 2 * tp, first + 2 * tp + 1}}, {"tp", {first + dp, first + 2 + dp}}}, job);
    EXPECT_EQ(odd->rank({"dp"}), dp);
    EXPECT_EQ(odd->rank({"tp"}), tp);
    EXPECT_EQ(error_of([&] {
                odd->sub({"dp", "tp"});
              }),
              "rank " + std::to_string(rank) +
                  " does not know the ranks along dp, tp, because its groups do not name "
                  "them. Number ranks with tp innermost, then sp, dp and pp");
  });
}

TEST(ProcessMesh, ListsBecomeAFold) {
  on_ranks_of_job(8, [](int rank, const JobPtr& job) {
    using Lists = std::vector<ProcessMesh::ListAlong>;
    const auto grid = grid_of(8, 1, 1, 2);
    const auto fold = [&](const Axes& from, int copies, int kinds, bool neighbours) {
      ProcessMesh mesh(grid, job);
      ProcessMesh expected(grid, job);
      const plan::Axis edp{"edp", copies, ""}, ep{"ep", kinds, ""};
      expected.fold("experts", from, neighbours ? std::vector{edp, ep} : std::vector{ep, edp});
      const auto found = [](ProcessMesh& one) {
        return Lists{{"edp", one.sub({"experts.edp"}).ranks}, {"ep", one.sub({"experts.ep"}).ranks}};
      };
      mesh.fold_lists("experts", found(expected));
      EXPECT_EQ(found(mesh), found(expected));
    };
    for (bool neighbours : {false, true}) {
      for (int kinds : {1, 2, 4}) fold({"dp", "sp"}, 4 / kinds, kinds, neighbours);
      for (int kinds : {1, 2, 4, 8}) fold({"dp", "sp", "tp"}, 8 / kinds, kinds, neighbours);
    }
    ProcessMesh mesh(grid, job);
    const int even = rank % 2, far = (rank + 4) % 8, next = rank / 2 % 2 == 0 ? rank + 2 : rank - 2;
    const Lists wrong{{"edp", {std::min(rank, next), std::max(rank, next)}},
                      {"ep", {std::min(rank, far), std::max(rank, far)}}};
    mesh.fold_lists("experts", wrong);  // these do
    const Lists same{{"edp", wrong[0].second}, {"ep", wrong[0].second}};
    EXPECT_TRUE(says(
        error_of([&] { mesh.fold_lists("others", same); }),
        "do not form a grid over the data-parallel ranks [" + std::to_string(even) + ", " + std::to_string(2 + even)));
    EXPECT_TRUE(
        says(error_of([&] { mesh.sub({"others.ep"}); }), "there is no axis others.ep"));  // the refused fold is undone
    EXPECT_TRUE(says(error_of([&] {
                       mesh.fold_lists("others", {{"edp", {rank}}, {"ep", {rank}}});
                     }),
                     "is not the 4 data-parallel ranks there are"));
  });
}

// Each rank asks for the communicators of several spaces in an order of its own; opening one waits for its members.
TEST(ProcessMesh, NoOrderOfOpeningHangs) {
  const int orders = cases_of("DS_OPENING_ORDERS", 2000, 60);
  for (int seed = 0; seed < orders; ++seed) {
    const int pp = 1 + seed % 2, sp = 1 + seed / 2 % 2, tp = 1 + seed / 4 % 2,
              world = pp * sp * tp * (seed % 3 == 0 ? 1 : 2);
    on_waiting_ranks_of_job(world, [=](int rank, const JobPtr& job) {
      ProcessMesh mesh(grid_of(world, pp, sp, tp), job);
      const int line = mesh.size({"dp", "sp"});
      mesh.fold("experts", {"dp", "sp"}, {{"edp", 0, ""}, {"ep", line % 2 == 0 ? 2 : 1, ""}});
      mesh.fold("dp", {"dp", "sp"}, {{"replicas", 0, ""}, {"mics", line % 2 == 0 ? 2 : 1, ""}});
      std::vector<Opening> openings;
      for (Purpose purpose : {Purpose::kReduce, Purpose::kExperts, Purpose::kControl, Purpose::kGather})
        for (const Axes& axes : {Axes{"pp"}, Axes{"dp", "sp"}, Axes{"tp"}, Axes{"dp.mics"}, Axes{"dp.replicas"},
                                 Axes{"experts.edp"}, Axes{"experts.ep"}, Axes{"sp"}})
          openings.push_back({axes, purpose});
      std::mt19937 random(1000 * seed + rank);
      std::shuffle(openings.begin(), openings.end(), random);
      const auto opened = mesh.open(openings);
      for (size_t i = 0; i < opened.size(); ++i) ASSERT_EQ(opened[i]->size(), mesh.size(openings[i].axes));
    });
  }
}

// A grid over some ranks of the job, in an order of their own: the others take no part.
TEST(ProcessMesh, GridsOverSomeRanks) {
  on_ranks_of_job(6, [](int rank, const JobPtr& job) {
    const std::vector<int> ranks{5, 1, 2, 0};
    const auto make = [&] { return ProcessMesh(grid_of(4, 2, 1, 1), job, ranks); };
    if (rank == 3 || rank == 4) {
      EXPECT_TRUE(says(error_of(make), "is not among the ranks [5, 1, 2, 0] of its mesh"));
      return;
    }
    ProcessMesh mesh = make();
    const bool first = rank == 5 || rank == 1;
    EXPECT_EQ(mesh.sub({"dp"}).ranks, first ? (std::vector<int>{5, 1}) : (std::vector<int>{2, 0}));
    EXPECT_EQ(mesh.rank({"dp"}), rank == 5 || rank == 2 ? 0 : 1);
    EXPECT_EQ(sum_over(*mesh.communicator(mesh.sub({"pp"}), Purpose::kControl), rank), rank == 5 || rank == 2 ? 7 : 1);
  });
}

TEST(ProcessMesh, ErrorsNameRankAndFix) {
  Meeting meeting;
  const auto job = job_of(1, 4, meeting);
  ProcessMesh mesh(grid_of(4, 1, 1, 1), job);
  EXPECT_EQ(error_of([&] {
              mesh.communicator({{0, 2}, 0}, Purpose::kReduce);
            }),
            "rank 1 opens a communicator of the ranks [0, 2] without being one of them: only its members do");
  EXPECT_EQ(error_of([&] {
              mesh.communicator({{1, 4}, 0}, Purpose::kReduce);
            }),
            "the ranks [1, 4] are not a group of a job of 4 ranks: give different ones of 0 to 3");
  EXPECT_EQ(error_of([&] {
              mesh.communicator({{1, 1}, 0}, Purpose::kReduce);
            }),
            "the ranks [1, 1] are not a group of a job of 4 ranks: give different ones of 0 to 3");
  EXPECT_EQ(error_of([&] { ProcessMesh(grid_of(8, 1, 1, 1), job); }),
            "a grid of 8 ranks does not fit a job of 4: make it with the size of the job");
  EXPECT_EQ(error_of([&] {
              ProcessMesh::adopt({{"dp", {0, 2}}}, job);
            }),
            "rank 1 is not among the ranks [0, 2] that it was given for dp: each rank gives the group that it is in");
  EXPECT_EQ(error_of([&] { Job(4, 4, nullptr); }), "rank 4 is not in a job of 4 ranks: give one of 0 to 3");
}

}  // namespace
}  // namespace ds::comm
