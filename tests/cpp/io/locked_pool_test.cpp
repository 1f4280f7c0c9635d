#include "io/memory/locked_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "base/error.h"

namespace ds::io {
namespace {

TEST(LockedPool, KnowsItsBlocksAndViewsOfThem) {
  const auto pool = std::make_shared<LockedPool>();
  char* end;
  {
    const auto block = pool->allocate(10000);
    EXPECT_EQ(block->bytes(), 12288u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block->data()) % 4096, 0u);
    EXPECT_EQ(pool->locked_bytes(), 12288u);
    EXPECT_TRUE(pool->holds(block->data(), 10000));
    EXPECT_TRUE(pool->holds(block->data() + 5000, 100));
    EXPECT_FALSE(pool->holds(block->data() + 5000, 10000));
    EXPECT_FALSE(pool->holds(block->data() - 1, 1));
    block->data()[9999] = 1;
    end = block->data() + 9999;
    EXPECT_TRUE(pool->release(end));  // by any byte of it
    EXPECT_FALSE(pool->release(end));
    EXPECT_FALSE(pool->holds(block->data(), 1));
    EXPECT_EQ(block->data()[9999], 1);  // still there
    EXPECT_EQ(pool->blocks(), 0u);
  }
  const auto small = pool->allocate(0);
  EXPECT_EQ(pool->locked_bytes(), 4096u);
  EXPECT_EQ(pool->peak_bytes(), 12288u);
}

TEST(LockedPool, ABlockOutlivesItsPool) {
  auto pool = std::make_shared<LockedPool>();
  auto block = pool->allocate(100);
  pool.reset();
  block->data()[99] = 7;
  block.reset();
}

// As a user without rights and with a limit.
TEST(LockedPool, TheLimitIsNamedWithTheBytesMissing) {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit = {1 << 20, 1 << 20};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) _exit(3);
    if (getuid() == 0 && setuid(65534) != 0) _exit(4);
    std::vector<char> more(2 << 20);
    if (mlock(more.data(), more.size()) == 0) _exit(5);
    const auto pool = std::make_shared<LockedPool>();
    const auto half = pool->allocate(512 << 10);
    try {
      pool->allocate(768 << 10);
    } catch (const Error& error) {
      const std::string text = error.what();
      const bool named = text.find("may lock 1048576 bytes") != std::string::npos &&
                         text.find(" bytes are missing. Raise the limit to ") != std::string::npos;
      _exit(named && pool->locked_bytes() == 512u << 10 ? 0 : 1);
    }
    _exit(2);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WEXITSTATUS(status) == 5) GTEST_SKIP() << "mlock knows no limit here: sanitizers replace it by nothing";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace ds::io
