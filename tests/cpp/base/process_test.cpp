#include "base/process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace {

template <typename Condition>
bool soon(const Condition& condition) {
  for (int i = 0; i < 5000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST(Process, LivesEndsAndIsGone) {
  EXPECT_FALSE(ds::process_ended(getpid()));
  EXPECT_EQ(ds::process_state(getpid()), 'R');
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  EXPECT_TRUE(soon([&] { return ds::process_state(child) == 'S'; }));
  EXPECT_FALSE(ds::process_ended(child));
  kill(child, SIGSTOP);
  EXPECT_TRUE(soon([&] { return ds::process_state(child) == 'T'; }));
  EXPECT_FALSE(ds::process_ended(child));
  kill(child, SIGKILL);
  EXPECT_TRUE(soon([&] { return ds::process_ended(child); }));  // though nobody has waited for it
  EXPECT_EQ(kill(child, 0), 0);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(ds::process_ended(child));
  EXPECT_EQ(ds::process_state(child), '?');
}

}  // namespace
