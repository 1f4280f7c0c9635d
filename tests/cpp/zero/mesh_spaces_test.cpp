// The communicators that an engine opens for its spaces: which, in which order, and where ranks share memory.
#include "zero/spaces/mesh_spaces.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <functional>
#include <tuple>

#include "../comm/thread_job.h"
#include "../error_of.h"
#include "../on_threads.h"
#include "base/error.h"
#include "comm/transports/thread_communicator.h"
#include "small_engine.h"

namespace ds::zero {
namespace {

using Keys = std::vector<std::string>;  // "<purpose>/<ranks>" of what a rank opens, "!" where ranks share memory

// Runs body(mesh, opened) on ranks that are threads; opening a communicator waits for its members. `opened` are the
// keys of the rank until then.
void on_meshes(int pp, int dp, int sp, int tp, const std::function<void(const comm::ProcessMeshPtr&, Keys&)>& body) {
  comm::Meeting meeting(/*waits=*/true);
  const int world = pp * dp * sp * tp;
  on_threads(world, [&](int rank) {
    Keys opened;
    const auto open = [&](const std::string& key, const comm::SubMesh& members, bool in_memory) {
      opened.push_back(key.substr(5, key.rfind('/') - 5) + (in_memory ? "!" : ""));
      return meeting.open(key, members);
    };
    const plan::ProcessGrid grid(world, {{"pp", pp, ""}, {"dp", dp, ""}, {"sp", sp, ""}, {"tp", tp, ""}});
    body(std::make_shared<comm::ProcessMesh>(grid, std::make_shared<comm::Job>(rank, world, open)), opened);
  });
}

ParamSpec spec_of(const std::string& rule, c10::Device device = at::kCPU) {
  ParamSpec spec{at::empty({2}, at::TensorOptions().device(device)), "w", 0, 0};
  spec.rule = rule;
  return spec;
}

TEST(MeshSpaces, OpensWhatSpacesNeedByPurposeThenAxes) {
  on_meshes(2, 2, 2, 2, [](const comm::ProcessMeshPtr& mesh, Keys& opened) {
    mesh->fold("experts", {"dp", "sp"}, {{"edp", 0, ""}, {"ep", 2, ""}});
    const MeshSpaces spaces(mesh, stage_policy(1), {spec_of("experts"), spec_of("dense")});
    if (mesh->job().rank() == 0) {
      const Keys expected{"reduce/0,2,4,6!", "experts/0,4", "control/0,2", "control/0,8", "control/0,1"};
      EXPECT_EQ(opened, expected);  // axes: dp and sp; experts.edp; experts.ep, pp, tp
    }
    EXPECT_EQ(spaces.communicators().size(), 5u);
    EXPECT_EQ(spaces.data_parallel()->size(), 4);
    EXPECT_EQ(spaces.of("experts", "").shard->size(), 2);
    const SpaceRanks& experts = spaces.of("experts", "");
    const auto gathers = experts.open(experts.axes.shard, plan::Purpose::kGather);
    EXPECT_EQ(opened.back().substr(0, 7), "gather/");
    EXPECT_EQ(experts.open({"experts.edp"}, plan::Purpose::kGather), gathers);
    EXPECT_EQ(spaces.communicators().size(), 6u);
    EXPECT_EQ(error_of([&] { spaces.of("experts.other", ""); }),
              "the ranks of the rule 'experts.other' were not opened: no parameter that the engine was given has it");
  });
}

TEST(MeshSpaces, OneRankOpensNothing) {
  for (int stage : {0, 1, 2, 3})
    on_meshes(1, 1, 1, 1, [stage](const comm::ProcessMeshPtr& mesh, Keys& opened) {
      const MeshSpaces spaces(mesh, stage_policy(stage), {spec_of("dense")});
      EXPECT_TRUE(spaces.everyone().alone());
      EXPECT_TRUE(spaces.communicators().empty() && opened.empty());
    });
}

TEST(MeshSpaces, MicsHasShardsAndReplicas) {
  on_meshes(1, 4, 1, 1, [](const comm::ProcessMeshPtr& mesh, Keys& opened) {
    mesh->fold("dp", plan::same_weights(), {{"replicas", 0, ""}, {"mics", 2, ""}});
    const MeshSpaces spaces(mesh, stage_policy(3), {spec_of("dense")});
    if (mesh->job().rank() == 0) {
      EXPECT_EQ(opened, (Keys{"reduce/0,1!", "reduce/0,2!"}));
    }
    EXPECT_EQ(spaces.everyone().replicas->size(), 2);
  });
}

// The device of a frozen model counts, too, which has no optimizer whose parameters could be asked.
TEST(MeshSpaces, RanksShareMemoryOnlyWhereAllParametersAreOnTheCpu) {
  using Devices = std::tuple<at::DeviceType, at::DeviceType, bool>;
  for (bool trained : {false, true})
    for (const auto& [first, second, shared] :
         {Devices(at::kCPU, at::kCPU, true), Devices(at::kCPU, at::kMeta, false), Devices(at::kMeta, at::kMeta, false)})
      on_meshes(1, 2, 1, 1, [&, a = first, b = second, shared = shared](const auto& mesh, Keys& opened) {
        std::vector<ParamSpec> params;
        std::vector<ShardedParamPtr> others;
        for (at::DeviceType device : {a, b}) {
          const ParamSpec spec = spec_of("dense", device);
          if (trained) params.push_back(spec);
          if (!trained) others.push_back(std::make_shared<ShardedParam>(spec.tensor, "w", 2, 0));
        }
        const MeshSpaces spaces(mesh, stage_policy(3), params, others);
        EXPECT_EQ(opened, (Keys{shared ? "reduce/0,1!" : "reduce/0,1"}));
      });
}

TEST(MeshSpaces, RanksWithDifferentSpacesAreToldAtOnce) {
  on_meshes(1, 4, 1, 1, [](const comm::ProcessMeshPtr& mesh, Keys&) {
    mesh->fold("experts", {"dp"}, {{"edp", 2, ""}, {"ep", 2, ""}});
    const auto open = [&] {
      MeshSpaces(mesh, stage_policy(1), {spec_of(mesh->job().rank() == 2 ? "dense" : "experts")});
    };
    EXPECT_EQ(
        error_of(open),
        "data-parallel ranks train different parameters: rank 0 needs communicators for control experts.ep; "
        "experts experts.edp; reduce dp sp, rank 2 for reduce dp sp. Give all data-parallel ranks the same layers "
        "with experts");
  });
}

TEST(MeshSpaces, AnAbortReachesRanksThatWaitInAnyOfThem) {
  const auto comms = comm::thread_communicators(2);
  on_threads(2, [&](int rank) {
    const MeshSpaces spaces(mesh_over(comms[rank]), stage_policy(2), {spec_of("dense")});
    if (rank == 1) return spaces.abort("no memory");
    EXPECT_TRUE(says(error_of([&] { spaces.data_parallel()->barrier(); }), "no memory"));
  });
}

}  // namespace
}  // namespace ds::zero
