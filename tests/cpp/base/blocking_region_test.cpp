#include "base/blocking_region.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace ds {
namespace {

std::atomic<int> entered{0};

void counted(const std::function<void()>& wait) {
  ++entered;
  wait();
}

struct Counted {
  Counted() {
    entered = 0;
    set_blocking_region(counted);
  }
  ~Counted() { set_blocking_region(nullptr); }
};

TEST(BlockingRegion, IsTheWaitItselfWithoutAnInterpreter) {
  int waits = 0;
  in_blocking_region([&] { ++waits; });
  EXPECT_EQ(waits, 1);
}

TEST(BlockingRegion, IsEnteredByAThreadThatWaitsForAMutex) {
  const Counted region;
  std::mutex mutex;
  { const auto alone = locked(mutex); }
  EXPECT_EQ(entered, 0);
  auto held = locked(mutex);
  std::atomic<bool> here{false};
  std::thread other([&] {
    const auto waited = locked(mutex);
    here = true;
  });
  while (entered == 0) std::this_thread::yield();
  EXPECT_FALSE(here);
  held.unlock();
  other.join();
  EXPECT_TRUE(here);
  EXPECT_EQ(entered, 1);
}

}  // namespace
}  // namespace ds
