// Numbers that hosts tell each other: how they travel, and what arrives.
#include "comm/calls/numbers.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <string>

#include "comm/decorators/logged.h"
#include "comm/transports/local_communicator.h"
#include "transports.h"

namespace ds::comm {
namespace {

using namespace testing_transports;

const c10::Device kGpu(c10::kCUDA, 0), kMeta(c10::kMeta), kCpu(c10::kCPU);

NcclCommPtr joined(const nccl::UniqueId& id, int rank, int size) {
  NcclMember member;
  member.rank = rank;
  member.size = size;
  member.timeout = std::chrono::seconds(60);
  member.on_device = as_this_thread();
  return NcclComm::join(NcclLibrary::open(fake_nccl_path()), id, member);
}

TEST(Numbers, TravelThroughTheHostWhereItsMemoryIsCarried) {
  const nccl::UniqueId id = NcclLibrary::open(fake_nccl_path())->make_id();
  const CommunicatorPtr thread = thread_communicators(1)[0], alone = nccl_communicator_alone(joined(id, 0, 1));
  const nccl::UniqueId other = NcclLibrary::open(fake_nccl_path())->make_id();
  const CommunicatorPtr both = nccl_communicator(joined(other, 0, 1), thread);
  for (const CommunicatorPtr& ranks : {thread, both, logged(both, std::make_shared<CallLog>(), "ranks")}) {
    EXPECT_TRUE(ranks->carries_host_memory());
    EXPECT_EQ(ranks->device_for_numbers(kGpu), kCpu);
  }
  EXPECT_FALSE(alone->carries_host_memory());
  EXPECT_EQ(alone->device_for_numbers(kGpu), kGpu);
  EXPECT_EQ(alone->device_for_numbers(kMeta), kCpu);
  EXPECT_EQ(alone->device_for_numbers(kCpu), kCpu);
}

TEST(Numbers, AreSummedAndGathered) {
  for (const std::string transport : {"thread", "shm", "nccl"})
    for (const int size : {1, 3})
      on_transport(transport, size, [&](int rank, Communicator& ranks) {
        const at::Tensor own = at::full({4}, rank + 1, at::kDouble), sum = own.clone();
        sum_numbers(ranks, sum, kCpu, "numbers");
        EXPECT_TRUE(at::equal(sum, at::full({4}, size * (size + 1) / 2, at::kDouble))) << transport;
        const at::Tensor all = gather_numbers(ranks, own, kCpu, "numbers");
        for (int other = 0; other < size; ++other)
          EXPECT_TRUE(at::equal(all[other], at::full({4}, other + 1, at::kDouble))) << transport;
      });
}

// No call of NCCL: the device of the caller has nothing to do with them.
TEST(Numbers, DoNotUseTheDeviceBesideAHost) {
  const nccl::UniqueId id = NcclLibrary::open(fake_nccl_path())->make_id();
  const auto threads = thread_communicators(2);
  const int64_t before = FAKE_NCCL(fake_nccl_count)("ncclAllReduce");
  on_threads(2, [&](int rank) {
    const CommunicatorPtr ranks = nccl_communicator(joined(id, rank, 2), threads[rank]);
    const at::Tensor sum = at::ones({2}, at::kFloat);
    sum_numbers(*ranks, sum, kGpu, "numbers");
    EXPECT_TRUE(at::equal(sum, at::full({2}, 2, at::kFloat)));
    ranks->barrier();
  });
  EXPECT_EQ(FAKE_NCCL(fake_nccl_count)("ncclAllReduce"), before);
}

}  // namespace
}  // namespace ds::comm
