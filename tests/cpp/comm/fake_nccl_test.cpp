// The library that stands in for NCCL (fake_nccl/) waits where NCCL does, and says who waits for whom.
#include "fake_nccl_calls.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../on_threads.h"
#include "comm/nccl/nccl_comm.h"

namespace ds::comm {
namespace {

using std::chrono::milliseconds;
void* const kFirst = reinterpret_cast<void*>(0x10);  // streams
void* stream(int rank, int number = 0) { return static_cast<char*>(kFirst) + 64 * rank + number; }

// The host waits for the work that is on a stream now.
int wait(void* stream) { return FAKE_NCCL(fake_nccl_wait)(stream, FAKE_NCCL(fake_nccl_record)(stream)); }
bool ended(void* stream) { return FAKE_NCCL(fake_nccl_ended)(stream, FAKE_NCCL(fake_nccl_record)(stream)) == 1; }
void pause() { std::this_thread::sleep_for(milliseconds(30)); }

class FakeNccl : public FakeNcclTest {
 protected:
  using Comms = std::vector<NcclCommPtr>;

  NcclCommPtr join(const nccl::UniqueId& id, int rank, int size) {
    NcclMember place;
    place.rank = rank;
    place.size = size;
    place.timeout = std::chrono::seconds(20);
    place.on_device = as_this_thread();
    return NcclComm::join(NcclLibrary::open(fake_nccl_path()), id, place);
  }

  // `count` communicators on each of `size` ranks, which are threads.
  template <typename Body>
  void on_ranks(int size, int count, const Body& body) {
    std::vector<nccl::UniqueId> ids(count);
    for (auto& id : ids) id = NcclLibrary::open(fake_nccl_path())->make_id();
    std::atomic<int> done{0};
    on_threads(size, [&](int rank) {
      Comms comms;
      for (const auto& id : ids) comms.push_back(join(id, rank, size));
      body(rank, comms);
      for (++done; done < size;) std::this_thread::yield();
    });
  }
  // The job has ended within 2 s, and its queues are told.
  void expect_end(std::chrono::steady_clock::time_point begin, const std::vector<std::string>& parts) {
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(2000));
    const std::string report = FAKE_NCCL(fake_nccl_report)();
    for (const std::string& part : parts) EXPECT_NE(report.find(part), std::string::npos) << part << " in " << report;
  }

  std::atomic<int> step{0};
  void reach(int wanted) const {
    while (step < wanted) std::this_thread::yield();
  }
};

TEST_F(FakeNccl, ASendEndsWhenItsReceiveRuns) {
  on_ranks(2, 1, [&](int rank, const Comms& comms) {
    float value = rank == 0 ? 7.f : 0.f;
    if (rank == 0) {
      comms[0]->send(&value, 1, nccl::kFloat32, 1, stream(0));
      pause();
      EXPECT_FALSE(ended(stream(0)));
      step = 1;
      EXPECT_EQ(wait(stream(0)), 0);
      return;
    }
    reach(1);
    comms[0]->recv(&value, 1, nccl::kFloat32, 0, stream(1));
    EXPECT_EQ(wait(stream(1)), 0);
    EXPECT_EQ(value, 7);
  });
}

TEST_F(FakeNccl, SomeBytesTravelAhead) {
  setenv("FAKE_NCCL_EAGER", "8", 1);
  on_ranks(2, 1, [&](int rank, const Comms& comms) {
    float values[3] = {1, 2, 3};
    if (rank == 0) {
      for (float& value : values) {
        comms[0]->send(&value, 1, nccl::kFloat32, 1, stream(0));
        if (&value != values + 2) {
          EXPECT_EQ(wait(stream(0)), 0);
        }
        if (&value != values + 2) value = 0;  // it has left
      }
      pause();
      EXPECT_FALSE(ended(stream(0)));  // the third one has no room
      step = 1;
      EXPECT_EQ(wait(stream(0)), 0);
      return;
    }
    reach(1);
    for (float& value : values) value = 0;
    for (float& value : values) comms[0]->recv(&value, 1, nccl::kFloat32, 0, stream(1));
    EXPECT_EQ(wait(stream(1)), 0);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(values[i], static_cast<float>(i + 1));
  });
}

// On two streams, but one communicator; a communicator of its own would not wait.
TEST_F(FakeNccl, ACommunicatorRunsItsCallsInOrderOverAllStreams) {
  on_ranks(2, 2, [&](int rank, const Comms& comms) {
    float first = 1, second = 2, third = 3;
    if (rank == 0) {
      comms[0]->send(&first, 1, nccl::kFloat32, 1, stream(0));
      comms[0]->recv(&second, 1, nccl::kFloat32, 1, stream(0, 1));
      comms[1]->recv(&third, 1, nccl::kFloat32, 1, stream(0, 2));
      EXPECT_EQ(wait(stream(0, 2)), 0);
      pause();
      EXPECT_FALSE(ended(stream(0, 1)));
      step = 1;
      EXPECT_EQ(wait(stream(0, 1)), 0);
      EXPECT_EQ(second, 4);
      return;
    }
    first = 0, second = 4;
    comms[1]->send(&third, 1, nccl::kFloat32, 0, stream(1));
    EXPECT_EQ(wait(stream(1)), 0);
    reach(1);
    comms[0]->recv(&first, 1, nccl::kFloat32, 0, stream(1, 1));
    comms[0]->send(&second, 1, nccl::kFloat32, 0, stream(1, 1));
    EXPECT_EQ(wait(stream(1, 1)), 0);
    EXPECT_EQ(first, 1);
  });
}

TEST_F(FakeNccl, FourOperationsRunAtOnceOnADevice) {
  constexpr int kComms = 6;
  on_ranks(2, kComms, [&](int rank, const Comms& comms) {
    std::vector<float> values(kComms, 1.f);
    if (rank == 1) reach(1);
    for (int i = 0; i < kComms; ++i)
      rank == 0 ? comms[i]->send(&values[i], 1, nccl::kFloat32, 1, stream(0, i))
                : comms[i]->recv(&values[i], 1, nccl::kFloat32, 0, stream(1, i));
    if (rank == 0) pause();
    step = 1;
    for (int i = 0; i < kComms; ++i) EXPECT_EQ(wait(stream(rank, i)), 0);
  });
  EXPECT_EQ(FAKE_NCCL(fake_nccl_count)("most running"), 4);
}

TEST_F(FakeNccl, MoreMemoryWaitsForWhatRuns) {
  on_ranks(2, 1, [&](int rank, const Comms& comms) {
    float value = 1;
    if (rank == 0) {
      comms[0]->send(&value, 1, nccl::kFloat32, 1, stream(0));
      pause();
      step = 1;
      FAKE_NCCL(fake_nccl_memory_grows)();
      EXPECT_TRUE(ended(stream(0)));
      EXPECT_EQ(step, 2);
      return;
    }
    reach(1);
    pause();
    step = 2;
    comms[0]->recv(&value, 1, nccl::kFloat32, 0, stream(1));
    EXPECT_EQ(wait(stream(1)), 0);
  });
}

// ---- what ends the job
// -----------------------------------------------------------------------------------------------

TEST_F(FakeNccl, ACircleOfStreamsEndsTheJob) {
  const auto begin = std::chrono::steady_clock::now();
  on_ranks(2, 1, [&](int rank, const Comms& comms) {
    float out = 1, in = 0;
    comms[0]->send(&out, 1, nccl::kFloat32, 1 - rank, stream(rank));
    comms[0]->recv(&in, 1, nccl::kFloat32, 1 - rank, stream(rank));
    EXPECT_NE(wait(stream(rank)), 0);
  });
  expect_end(begin, {"wait for each other in a circle", "runs, send to rank 1", "runs, send to rank 0",
                     "queued, recv from rank 1", "queued, recv from rank 0"});
}

// Each host waits for its send, and would receive in the other communicator afterwards.
TEST_F(FakeNccl, ACircleThroughHostsEndsTheJob) {
  const auto begin = std::chrono::steady_clock::now();
  on_ranks(2, 2, [&](int rank, const Comms& comms) {
    float out = 1;
    comms[rank]->send(&out, 1, nccl::kFloat32, 1 - rank, stream(rank));
    EXPECT_NE(wait(stream(rank)), 0);
  });
  expect_end(begin, {"in a circle, hosts among them", "thread "});
}

// A rank whose host computes for long is waited for.
TEST_F(FakeNccl, ASlowRankIsNoCircle) {
  on_ranks(2, 1, [&](int rank, const Comms& comms) {
    float value = 1;
    if (rank == 1) std::this_thread::sleep_for(milliseconds(2200));
    comms[0]->all_reduce(&value, &value, 1, nccl::kFloat32, nccl::kSum, stream(rank));
    EXPECT_EQ(wait(stream(rank)), 0);
    EXPECT_EQ(value, 2);
  });
  EXPECT_STREQ(FAKE_NCCL(fake_nccl_report)(), "");
}

TEST_F(FakeNccl, CallsThatDoNotMatchEndTheJob) {
  const auto begin = std::chrono::steady_clock::now();
  on_ranks(2, 1, [&](int rank, const Comms& comms) {
    float values[2] = {};
    rank == 0 ? comms[0]->send(values, 2, nccl::kFloat32, 1, stream(0))
              : comms[0]->recv(values, 1, nccl::kFloat32, 0, stream(1));
    EXPECT_NE(wait(stream(rank)), 0);
  });
  expect_end(begin, {"calls do not match", "send to rank 1 number 0 of 2 x float32", "number 0 of 1 x float32"});
}

// ---- ranks as processes
// ----------------------------------------------------------------------------------------------

TEST_F(FakeNccl, RanksMayBeProcesses) {
  const nccl::UniqueId id = NcclLibrary::open(fake_nccl_path())->make_id();
  const auto works = [&](int rank) {
    const NcclCommPtr comm = join(id, rank, 2);
    std::vector<double> sum(1000, rank + 1.0), all(2000), got(1000);
    comm->all_reduce(sum.data(), sum.data(), 1000, nccl::kFloat64, nccl::kSum, stream(rank));
    comm->all_gather(sum.data(), all.data(), 1000, nccl::kFloat64, stream(rank));
    comm->grouped([&] {
      comm->send(all.data(), 1000, nccl::kFloat64, 1 - rank, stream(rank));
      comm->recv(got.data(), 1000, nccl::kFloat64, 1 - rank, stream(rank));
    });
    const bool good = wait(stream(rank)) == 0 && got == std::vector<double>(1000, 3.0);
    comm->close();
    return good;
  };
  const pid_t child = fork();
  if (child == 0) _exit(works(1) ? 0 : 1);
  EXPECT_TRUE(works(0));
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace ds::comm
