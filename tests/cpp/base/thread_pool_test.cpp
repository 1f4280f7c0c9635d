#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../error_of.h"
#include "../on_threads.h"
#include "base/error.h"

namespace ds {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, testing::Values(1, 2, 3, 8));

TEST_P(ThreadPoolTest, CoversEveryElementOnce) {
  ThreadPool pool(GetParam());
  for (size_t n : {0, 1, 2, 7, 64, 1000, 12345}) {
    for (size_t grain : {0, 1, 3, 64, 5000}) {
      std::vector<std::atomic<int>> seen(n);
      pool.parallel_for(n, grain, [&](size_t begin, size_t end) {
        ASSERT_LT(begin, end);
        ASSERT_LE(end, n);
        if (grain > 0) {
          EXPECT_EQ(begin % grain, 0u);
        }
        for (size_t i = begin; i < end; ++i) ++seen[i];
      });
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(seen[i], 1) << "n " << n << " grain " << grain << " i " << i;
    }
  }
}

TEST_P(ThreadPoolTest, TheSplitIsAlwaysTheSame) {
  const auto split = [](ThreadPool& pool) {
    std::mutex mutex;
    std::set<std::pair<size_t, size_t>> chunks;
    pool.parallel_for(100003, 64, [&](size_t begin, size_t end) {
      std::lock_guard lock(mutex);
      chunks.emplace(begin, end);
    });
    return chunks;
  };
  ThreadPool one(GetParam()), other(GetParam());
  const auto expected = split(one);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(split(one), expected);
    EXPECT_EQ(split(other), expected);
  }
}

TEST_P(ThreadPoolTest, RethrowsTheFirstExceptionAndWorksAgain) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 50; ++round) {
    const auto chunk = [](size_t begin, size_t) {
      if (begin == 0) throw std::runtime_error("chunk 0");
    };
    EXPECT_EQ(failure_of<std::runtime_error>([&] { pool.parallel_for(1000, 1, chunk); }), "chunk 0");
    std::atomic<size_t> sum{0};
    pool.parallel_for(1000, 1, [&](size_t begin, size_t end) { sum += end - begin; });
    EXPECT_EQ(sum, 1000u);
  }
}

TEST_P(ThreadPoolTest, CallersOnSeveralThreadsTakeTurns) {
  ThreadPool pool(GetParam());
  std::atomic<int> wrong{0};
  on_threads(4, [&](int) {
    for (int round = 0; round < 200; ++round) {
      std::atomic<size_t> sum{0};
      pool.parallel_for(257, 1, [&](size_t begin, size_t end) { sum += end - begin; });
      if (sum != 257) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST_P(ThreadPoolTest, SleepingWorkersWakeUp) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // longer than workers spin
    std::atomic<size_t> sum{0};
    pool.parallel_for(1000, 1, [&](size_t begin, size_t end) { sum += end - begin; });
    EXPECT_EQ(sum, 1000u);
  }
}

TEST_P(ThreadPoolTest, AForkedChildRunsInline) {
  ThreadPool pool(GetParam());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a hang ends the child
    {
      size_t sum = 0;
      pool.parallel_for(1000, 1, [&](size_t begin, size_t end) { sum += end - begin; });
      if (sum != 1000) _exit(1);
    }
    pool.~ThreadPool();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(ThreadPool, UsesItsThreads) {
  ThreadPool pool(3);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::atomic<int> arrived{0};
  pool.parallel_for(3, 1, [&](size_t, size_t) {
    {
      std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    }
    // Nobody leaves before three threads are here, so no thread can take two chunks.
    ++arrived;
    for (int i = 0; i < 10000 && arrived < 3; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  EXPECT_EQ(ids.size(), 3u);
  EXPECT_EQ(ids.count(std::this_thread::get_id()), 1u);
}

TEST(ThreadPool, RefusesNoThreads) {
  for (int threads : {0, -1}) {
    EXPECT_TRUE(says(error_of(ErrorKind::kValue, [&] { ThreadPool pool(threads); }), "at least 1 thread"));
  }
}

}  // namespace
}  // namespace ds
