#include "io/async/transfer_queue.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "../error_of.h"
#include "../on_threads.h"
#include "io/memory/aligned_pool.h"

namespace ds::io {
namespace {

TransferQueue::Request request(uint64_t bytes, TransferQueue::Part move) {
  TransferQueue::Request made;
  made.bytes = bytes;
  made.move = std::move(move);
  return made;
}

TEST(TransferQueue, PartsCoverARequestOnce) {
  for (const int threads : {1, 3}) {
    TransferQueue queue(threads);
    std::atomic<uint64_t> bytes{0};
    std::atomic<int> parts{0};
    std::atomic<int> after{0};
    auto made = request(10 * kBlockBytes + 5, [&](uint64_t, uint64_t part) {
      bytes += part;
      ++parts;
    });
    made.after = [&] {
      EXPECT_EQ(bytes, 10 * kBlockBytes + 5);
      ++after;
    };
    queue.run(made);
    EXPECT_EQ(parts, threads);
    EXPECT_EQ(after, 1);
    parts = 0;
    bytes = 0;
    queue.run(made, /*alone=*/true);
    EXPECT_EQ(parts, 1);
    queue.run(request(0, [&](uint64_t, uint64_t part) { EXPECT_EQ(part, 0u); }));
  }
}

TEST(TransferQueue, WaitCountsWhatWasStarted) {
  TransferQueue queue(2);
  std::atomic<int> ended{0};
  EXPECT_EQ(queue.wait(), 0);
  for (int i = 0; i < 5; ++i) {
    queue.start(request(1 << 20, [&](uint64_t, uint64_t) {
      usleep(1000);
      ++ended;
    }));
  }
  EXPECT_EQ(queue.pending(), 5);
  queue.start(request(1, [](uint64_t, uint64_t) {}), /*counted=*/false).wait();
  EXPECT_EQ(queue.wait(), 5);
  EXPECT_EQ(ended, 10);
  EXPECT_EQ(queue.wait(), 0);
  EXPECT_EQ(queue.pending(), 0);
}

TEST(TransferQueue, TheFirstErrorComesOutWhenAllHaveEnded) {
  TransferQueue queue(2);
  std::atomic<int> ended{0};
  queue.start(request(1, [](uint64_t, uint64_t) { fail(ErrorKind::kRuntime, "first"); }));
  queue.start(request(1, [&](uint64_t, uint64_t) {
    usleep(5000);
    ++ended;
  }));
  EXPECT_EQ(error_of([&] { queue.wait(); }), "first");
  EXPECT_EQ(ended, 1);
  queue.start(request(1, [](uint64_t, uint64_t) {}));
  EXPECT_EQ(queue.wait(), 1);
  const auto ticket = queue.start(request(1, [](uint64_t, uint64_t) { fail(ErrorKind::kRuntime, "own"); }), false);
  EXPECT_THROW(ticket.wait(), Error);
  EXPECT_EQ(queue.wait(), 0);
  auto after = request(1, [](uint64_t, uint64_t) {});
  after.after = [] { fail(ErrorKind::kRuntime, "after"); };
  queue.start(after);
  EXPECT_THROW(queue.wait(), Error);
  EXPECT_THROW(queue.run(after), Error);
}

TEST(TransferQueue, ManyThreadsShareOne) {
  TransferQueue queue(3);
  std::atomic<int64_t> counted{0};
  std::atomic<uint64_t> moved{0};
  on_threads(4, [&](int) {
    for (int i = 0; i < 50; ++i) {
      queue.start(request(3 * kBlockBytes, [&](uint64_t, uint64_t bytes) { moved += bytes; }));
      queue.run(request(kBlockBytes, [&](uint64_t, uint64_t bytes) { moved += bytes; }));
      if (i % 10 == 0) counted += queue.wait();
    }
  });
  counted += queue.wait();
  EXPECT_EQ(counted, 200);
  EXPECT_EQ(moved, 4 * 50 * 4 * kBlockBytes);
}

TEST(TransferQueue, TheEndWaitsAndDropsErrors) {
  std::atomic<int> ended{0};
  {
    TransferQueue queue(1);
    for (int i = 0; i < 3; ++i) {
      queue.start(request(1, [&](uint64_t, uint64_t) {
        ++ended;
        fail(ErrorKind::kRuntime, "dropped");
      }));
    }
  }
  EXPECT_EQ(ended, 3);
}

TEST(TransferQueue, AForkIsToldToMakeItsOwn) {
  TransferQueue queue(1);
  queue.start(request(1, [](uint64_t, uint64_t) {}));
  queue.wait();
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      queue.start(request(1, [](uint64_t, uint64_t) {}));
    } catch (const Error& error) {
      code = std::string(error.what()).find("forked") != std::string::npos ? 0 : 2;
    }
    _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(TransferQueue, ThreadsOutOfRange) {
  EXPECT_THROW(TransferQueue(0), Error);
  EXPECT_THROW(TransferQueue(1025), Error);
}

}  // namespace
}  // namespace ds::io
