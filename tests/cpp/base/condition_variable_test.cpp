#include "base/condition_variable.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <mutex>
#include <thread>

namespace ds {
namespace {

struct Waited {
  std::mutex mutex;
  ConditionVariable changed;
  bool waiting = false, ending = false;

  std::thread start() {
    std::thread thread([this] {
      std::unique_lock lock(mutex);
      waiting = true;
      changed.wait(lock, [this] { return ending; });
    });
    for (;;) {  // the mutex is free again only when the thread waits
      const std::lock_guard lock(mutex);
      if (waiting) return thread;
    }
  }
};

TEST(ConditionVariable, EndsInAForkedChildWhileThreadsOfTheParentWait) {
  auto waited = std::make_unique<Waited>();
  std::thread thread = waited->start();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // kills a child that hangs
    waited.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "the child ended by signal " << WTERMSIG(status);
  {
    const std::lock_guard lock(waited->mutex);
    waited->ending = true;
  }
  waited->changed.notify_all();
  thread.join();
}

}  // namespace
}  // namespace ds
