// Shared memory between ranks. Here the ranks are threads of one process with a segment each; tests/dist has processes.
#include "comm/shared_memory/shm_group.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <dirent.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "../every_case.h"
#include "../on_threads.h"
#include "../error_of.h"
#include "base/error.h"
#include "comm/shared_memory/process_peer_memory.h"
#include "comm/shared_memory/shm_queue.h"
#include "comm/transports/thread_communicator.h"

namespace ds::comm {
namespace {

using namespace std::chrono_literals;

template <typename Body>
void on_ranks(int size, Body body, std::chrono::milliseconds timeout = 60s,
              const std::function<DiagnosticCallbacks(int)>& callbacks = nullptr) {
  auto inners = thread_communicators(size);
  on_threads(size, [&](int rank) {
    GroupFacts facts;
    facts.name = "tried";
    if (callbacks) facts.watch = std::make_shared<Watch>(callbacks(rank));
    auto group = ShmGroup::create(rank, size, rendezvous_over(*inners[rank]), timeout, facts);
    ASSERT_TRUE(group);
    body(rank, std::move(group));
  });
}

// The numbers that rank `rank` gives in round `round`: whole numbers, so that sums are exact in every order.
at::Tensor given(int round, int rank, int64_t numel, at::ScalarType type) {
  return at::remainder(at::arange(numel, at::kLong) * 7 + round * 3 + rank * 5, 11).to(type);
}

Rows even(const at::Tensor& all, int size) { return rows_of(all.data_ptr(), size, all.nbytes() / size); }

struct Draw {
  int kind, root, type, op;
  int64_t numel;
  bool later;
};

// The same sequence on all ranks.
std::vector<Draw> draws(int count, int size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Draw> made;
  for (int i = 0; i < count; ++i) {
    const int64_t limit = random() % 200 == 0 ? 300000 : random() % 8 == 0 ? 5000 : 100;
    made.push_back({static_cast<int>(random() % 9), static_cast<int>(random() % size), static_cast<int>(random() % 4),
                    static_cast<int>(random() % 2), static_cast<int64_t>(random() % limit), random() % 3 == 0});
  }
  return made;
}

at::Tensor sum_of(int round, int size, int64_t numel, at::ScalarType type, bool max) {
  at::Tensor sum = given(round, 0, numel, at::kLong);
  for (int r = 1; r < size; ++r) {
    const at::Tensor other = given(round, r, numel, at::kLong);
    sum = max ? at::maximum(sum, other) : sum + other;
  }
  return sum.to(type);
}

// One collective: returns how to run it and how to check it.
std::pair<std::function<void(ShmGroup&)>, std::function<bool()>> make(const Draw& d, int round, int rank, int size) {
  const at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kInt, at::kByte};
  const at::ScalarType type = types[d.type];
  const ReduceOp op = d.op ? ReduceOp::kMax : ReduceOp::kSum;
  const auto n = static_cast<size_t>(d.numel);
  const at::Tensor mine = given(round, rank, d.numel, type);
  switch (d.kind) {
    case 0:
      return {[=](ShmGroup& g) { g.all_reduce(mine.data_ptr(), n, type, op); },
              [=] { return at::equal(mine, sum_of(round, size, d.numel, type, d.op)); }};
    case 1:
      return {[=](ShmGroup& g) { g.reduce(mine.data_ptr(), n, type, op, d.root); },
              [=] {
                return at::equal(mine, rank == d.root ? sum_of(round, size, d.numel, type, d.op)
                                                      : given(round, rank, d.numel, type));
              }};
    case 2:
      return {[=](ShmGroup& g) { g.broadcast(mine.data_ptr(), n, type, d.root); },
              [=] { return at::equal(mine, given(round, d.root, d.numel, type)); }};
    case 3: {
      const at::Tensor all = at::empty({size, d.numel}, mine.options());
      return {[=](ShmGroup& g) { g.all_gather(even(all, size), mine.data_ptr(), n, type); },
              [=] {
                for (int r = 0; r < size; ++r)
                  if (!at::equal(all[r], given(round, r, d.numel, type))) return false;
                return true;
              }};
    }
    case 4: {  // in place, into its own row
      const at::Tensor all = given(round, rank, d.numel * size, type).view({size, d.numel});
      return {[=](ShmGroup& g) { g.reduce_scatter(all[rank].data_ptr(), even(all, size), n, type, op, false); },
              [=] {
                const at::Tensor whole = sum_of(round, size, d.numel * size, type, d.op).view({size, d.numel});
                return at::equal(all[rank], whole[rank]);
              }};
    }
    case 5: {  // uneven: rank a sends (a + b + round) % 3 * numel / 2 elements to rank b
      const auto count = [=](int from, int to) { return (from + to + round) % 3 * d.numel / 2; };
      std::vector<int64_t> give, take;
      int64_t in = 0, out = 0;
      for (int r = 0; r < size; ++r) {
        give.push_back(count(rank, r));
        take.push_back(count(r, rank));
        in += give.back();
        out += take.back();
      }
      const at::Tensor source = given(round, rank, in, type), target = at::empty({out}, mine.options());
      const auto rows = [](const at::Tensor& t, const std::vector<int64_t>& counts) {
        Rows made;
        auto* next = static_cast<char*>(t.data_ptr());
        for (int64_t c : counts) {
          made.push_back(next);
          next += c * static_cast<int64_t>(t.element_size());
        }
        return made;
      };
      return {[=](ShmGroup& g) { g.all_to_all(rows(target, take), take, rows(source, give), give, type); },
              [=] {
                int64_t at = 0;
                for (int r = 0; r < size; ++r) {
                  int64_t before = 0, theirs = 0;
                  for (int to = 0; to < size; ++to) {
                    if (to < rank) before += count(r, to);
                    theirs += count(r, to);
                  }
                  const at::Tensor whole = given(round, r, theirs, type);
                  if (!at::equal(target.narrow(0, at, take[r]), whole.narrow(0, before, take[r]))) return false;
                  at += take[r];
                }
                return true;
              }};
    }
    case 6: {
      const at::Tensor all = at::empty({size, d.numel}, mine.options());
      return {
          [=](ShmGroup& g) { g.gather(rank == d.root ? even(all, size) : Rows(), mine.data_ptr(), n, type, d.root); },
          [=] {
            for (int r = 0; rank == d.root && r < size; ++r)
              if (!at::equal(all[r], given(round, r, d.numel, type))) return false;
            return true;
          }};
    }
    case 7: {
      const at::Tensor all = given(round, d.root, d.numel * size, type);
      return {
          [=](ShmGroup& g) { g.scatter(mine.data_ptr(), rank == d.root ? even(all, size) : Rows(), n, type, d.root); },
          [=] {
            return at::equal(mine, all.view({size, d.numel})[rank]);
          }};
    }
    default: return {[](ShmGroup& g) { g.barrier(); }, [] { return true; }};
  }
}

// DS_SHM_CASES: collectives in all, over the four sizes.
int cases() { return cases_of("DS_SHM_CASES", 12000, 4000); }

class OfSize : public testing::TestWithParam<int> {};

TEST_P(OfSize, RandomCollectivesEqualASerialModel) {
  const int size = GetParam();
  const auto plan = draws(cases() / 4, size, 17u + static_cast<unsigned>(size));
  on_ranks(
      size,
      [&](int rank, std::unique_ptr<ShmGroup> group) {
        ShmQueue queue(std::move(group), true);
        std::deque<std::pair<ShmQueue::TaskPtr, std::function<bool()>>> open;
        const auto close = [&](size_t index) {
          queue.complete(open[index].first);
          ASSERT_TRUE(open[index].second()) << "of " << size << " ranks, rank " << rank;
          open.erase(open.begin() + static_cast<int64_t>(index));
        };
        std::mt19937 own(99u + static_cast<unsigned>(rank));  // each rank waits in an order of its own
        for (size_t i = 0; i < plan.size(); ++i) {
          auto [run, check] = make(plan[i], static_cast<int>(i), rank, size);
          const auto start = !plan[i].later   ? ShmQueue::Start::kByWaiting
                             : own() % 2 == 0 ? ShmQueue::Start::kSoon
                                              : ShmQueue::Start::kPerhapsLater;
          open.emplace_back(queue.submit(std::move(run), start), std::move(check));
          if (!plan[i].later) close(open.size() - 1);
          if (open.size() > 5) close(own() % open.size());
          if (testing::Test::HasFatalFailure()) return;
        }
        while (!open.empty() && !testing::Test::HasFatalFailure()) close(open.size() - 1);
      },
      600s);  // on a machine with many others, a thread may get no core for minutes
}

INSTANTIATE_TEST_SUITE_P(ShmGroup, OfSize, testing::Values(2, 3, 4, 8));

// A folder for flight records, named by DS_COMM_TRACE_DIR while it lives.
class TraceFolder {
 public:
  TraceFolder() {
    char name[] = "/tmp/shm_group_test_XXXXXX";
    path_ = mkdtemp(name);
    setenv("DS_COMM_TRACE_DIR", path_.c_str(), 1);
  }
  ~TraceFolder() {
    unsetenv("DS_COMM_TRACE_DIR");
    std::filesystem::remove_all(path_);
  }
  std::vector<std::string> texts() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      std::ifstream file(entry.path());
      found.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return found;
  }

 private:
  std::string path_;
};

TEST(ShmGroup, WhereRanksOutnumberCoresEachSleepsOnceInABarrier) {
  constexpr int kRanks = 6, kBarriers = 300;
  cpu_set_t one, before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core)
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);  // threads inherit it
  std::atomic<int64_t> sleeps{0};
  on_ranks(kRanks, [&](int rank, std::unique_ptr<ShmGroup> group) {
    const auto slept = [] {
      rusage used{};
      getrusage(RUSAGE_THREAD, &used);
      return static_cast<int64_t>(used.ru_nvcsw);
    };
    group->barrier();
    const int64_t first = slept();
    for (int i = 0; i < kBarriers; ++i) group->barrier();
    sleeps += slept() - first;
    auto value = static_cast<float>(rank);
    group->all_reduce(&value, 1, at::kFloat, ReduceOp::kSum);
    EXPECT_EQ(value, kRanks * (kRanks - 1) / 2.0f);
  });
  sched_setaffinity(0, sizeof(before), &before);
  EXPECT_LE(sleeps, (kRanks - 1) * kBarriers * 11 / 10);  // waiting for one after the other: a third more
}

TEST(ShmGroup, DifferentCallsAreNamedOnEveryRank) {
  const TraceFolder traces;
  std::vector<std::string> texts(3);
  on_ranks(3, [&](int rank, std::unique_ptr<ShmGroup> group) {
    float values[8] = {};
    texts[rank] = error_of([&] {
      if (rank == 1) {
        group->broadcast(values, 8, at::kFloat, 0);
      } else {
        group->all_reduce(values, rank == 2 ? 4 : 8, at::kFloat, ReduceOp::kSum);
      }
    });
    EXPECT_TRUE(says(error_of([&] { group->barrier(); }), "has failed before"));
  });
  for (const std::string& text : texts) {
    EXPECT_TRUE(says(text, "rank 0 all_reduce(8 x float32, sum)"));
    EXPECT_TRUE(says(text, "rank 1 broadcast(8 x float32, root 0)"));
    EXPECT_TRUE(says(text, "rank 2 all_reduce(4 x float32, sum)"));
  }
}

TEST(ShmGroup, AMissingRankIsNamed) {
  const TraceFolder traces;
  std::vector<std::string> texts(3);
  std::atomic<int> tired{0};
  on_ranks(
      3,
      [&](int rank, std::unique_ptr<ShmGroup> group) {
        if (rank == 1) {
          while (tired < 2) std::this_thread::sleep_for(5ms);
          return;
        }
        texts[rank] = error_of([&] { group->barrier(); });
        ++tired;
      },
      600ms);
  const bool first = texts[0].find("rank 1 (process") == 0, second = texts[2].find("rank 1 (process") == 0;
  EXPECT_TRUE(first || second);  // the other may hear of it from its neighbour
  for (int rank : {0, 2}) {
    EXPECT_TRUE(says(texts[rank], "has not come"));
    EXPECT_TRUE(says(texts[rank], "barrier()"));
  }
}

TEST(ShmGroup, ARankThatLeavesIsNamed) {
  const TraceFolder traces;
  std::string text;
  on_ranks(2, [&](int rank, std::unique_ptr<ShmGroup> group) {
    if (rank == 1) return;
    text = error_of([&] { group->barrier(); });
  });
  EXPECT_TRUE(says(text, "rank 1 (process"));
  EXPECT_TRUE(says(text, "has destroyed its process group"));
}

TEST(ShmGroup, AFailureSaysWhereEveryRankIs) {
  const TraceFolder traces;
  std::vector<std::string> texts(3);
  const auto callbacks = [](int rank) {
    DiagnosticCallbacks made;
    if (rank != 2) made.stacks = [rank] { return "line one\nline two of rank " + std::to_string(rank); };
    return made;
  };
  on_ranks(
      3,
      [&](int rank, std::unique_ptr<ShmGroup> group) {
        float values[8] = {};
        group->all_reduce(values, 8, at::kFloat, ReduceOp::kSum, "first.weight");
        texts[rank] = error_of([&] { group->broadcast(values, rank == 1 ? 7 : 8, at::kFloat, 0, "second.bias"); });
      },
      60s, callbacks);
  for (const std::string& text : texts) {
    EXPECT_TRUE(says(text, "rank 1 broadcast(7 x float32, root 0) of \"second.bias\""));
    EXPECT_TRUE(says(text, "in broadcast(8 x float32, root 0) of \"second.bias\", number 2, for"));
    EXPECT_TRUE(says(text, "\n    line two of rank 0"));
    EXPECT_TRUE(says(text, "\n    line two of rank 1"));
    EXPECT_TRUE(says(text, "no interpreter answers there"));
    EXPECT_TRUE(says(text, "The last collectives of all ranks are in /tmp/shm_group_test_"));
  }
  const auto files = traces.texts();
  ASSERT_EQ(files.size(), 3u);
  for (const std::string& file : files) {
    EXPECT_TRUE(says(file, "\"tag\": \"first.weight\""));
    EXPECT_TRUE(says(file, "\"state\": \"under way\""));
  }
}

TEST(ShmGroup, TagsThatDifferAreAMismatch) {
  const TraceFolder traces;
  std::vector<std::string> texts(2);
  on_ranks(2, [&](int rank, std::unique_ptr<ShmGroup> group) {
    float values[8] = {};
    group->all_reduce(values, 8, at::kFloat, ReduceOp::kSum, rank ? "" : "a");  // not everybody knows
    texts[rank] = error_of([&] { group->all_reduce(values, 8, at::kFloat, ReduceOp::kSum, rank ? "b" : "a"); });
  });
  for (const std::string& text : texts) EXPECT_TRUE(says(text, "rank 1 all_reduce(8 x float32, sum) of \"b\""));
}

TEST(ShmGroup, AnInterpreterThatDoesNotAnswerIsNamed) {
  const TraceFolder traces;
  std::vector<std::string> texts(2);
  std::atomic<bool> over{false};
  const auto callbacks = [&](int rank) {
    DiagnosticCallbacks made;
    made.stacks = [rank, &over] {
      while (rank == 1 && !over) std::this_thread::sleep_for(5ms);
      return std::string("here");
    };
    return made;
  };
  on_ranks(
      2,
      [&](int rank, std::unique_ptr<ShmGroup> group) {
        if (rank == 0) texts[0] = error_of([&] { group->barrier(); });
        if (rank == 0) over = true;
        while (!over) std::this_thread::sleep_for(5ms);
      },
      300ms, callbacks);
  EXPECT_TRUE(says(texts[0], "it does not answer: its interpreter is busy"));
  EXPECT_TRUE(says(texts[0], "has not entered any collective"));
}

TEST(FlightRing, KeepsTheLast256) {
  auto ring = std::make_unique<FlightRing>();
  EXPECT_TRUE(ring->read().empty());
  for (int number = 1; number <= 1000; ++number) {
    ring->begin(record("all_reduce", number, 6, "name"), number);
    if (number != 1000) ring->end(number);
  }
  const auto flights = ring->read();
  ASSERT_EQ(flights.size(), 256u);
  EXPECT_EQ(flights.front().number, 745);
  EXPECT_EQ(flights.back().call.numel, 1000);
  EXPECT_EQ(flights.back().end_us, 0);
  EXPECT_GT(flights.front().end_us, 0);
  EXPECT_EQ(json_text("a\"b\\\n"), "\"a\\\"b\\\\\\u000a\"");
}

TEST(FlightRing, IsReadWhileItIsWritten) {
  auto ring = std::make_unique<FlightRing>();
  std::atomic<bool> over{false};
  std::thread writer([&] {
    for (int64_t number = 1; number <= 20000; ++number) {
      Record call = record("all_reduce", number, 6);
      call.longest = number;
      ring->begin(call, number);
      ring->end(number);
    }
    over = true;
  });
  while (!over)
    for (const Flight& flight : ring->read()) ASSERT_TRUE(flight.call.numel == flight.call.longest);
  writer.join();
}

TEST(SlowRank, IsReportedOnceAndOnlyWhenItIsSlow) {
  SlowRank slow(3);
  int64_t now = 1000;
  std::vector<std::string> lines;
  const auto rounds = [&](int count, int64_t step, int64_t extra) {
    for (int i = 0; i < count; ++i) {
      now += step;
      const std::string line = slow.note({now, now + extra, now + 1000});
      now += extra;
      if (!line.empty()) lines.push_back(line);
    }
  };
  rounds(1000, 10000, 2000);  // a little later than the others
  EXPECT_TRUE(lines.empty());
  rounds(100, 10000, 190000);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].find("rank 1 is slow: in the last"), 0u) << lines[0];
}

int descriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder)) ++count;
  closedir(folder);
  return count;
}

TEST(ShmGroup, NothingIsLeftBehind) {
  const auto once = [] { on_ranks(3, [](int, std::unique_ptr<ShmGroup> group) { group->barrier(); }); };
  once();
  const int before = descriptors();
  for (int i = 0; i < 200; ++i) once();
  EXPECT_EQ(descriptors(), before);
}

}  // namespace
}  // namespace ds::comm
