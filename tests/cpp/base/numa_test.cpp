#include "base/numa.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include "base/thread_pool.h"

namespace ds {
namespace {

namespace fs = std::filesystem;
using Lists = std::vector<std::vector<int>>;

// The files that the kernel shows on a machine with these nodes.
class NumaTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("ds-numa-test-" + std::to_string(getpid()));
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& file, const std::string& text) {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << "\n";
  }
  Lists usable() const { return usable_nodes(root_); }

  fs::path root_;
};

std::vector<int> allowed() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  std::vector<int> found;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) found.push_back(cpu);
  return found;
}

TEST_F(NumaTest, NodesHaveTheProcessorsThatThisProcessMayUse) {
  EXPECT_TRUE(usable().empty());  // the system says nothing
  write("online", "0-1,7");
  write("node0/cpulist", "0-1023");
  write("node1/cpulist", "100000-100003");  // none of ours
  write("node7/cpulist", "");
  EXPECT_EQ(usable(), Lists({allowed()}));
  const int one = allowed()[0];
  write("node1/cpulist", std::to_string(one) + ",5000");
  EXPECT_EQ(usable(), Lists({allowed(), {one}}));
  write("online", "nonsense");
  EXPECT_TRUE(usable().empty());
}

TEST_F(NumaTest, ThisMachineHasAllItsProcessorsSomewhere) {
  const Lists nodes = usable_nodes();
  if (nodes.empty()) GTEST_SKIP() << "this system does not show its memory nodes";
  size_t found = 0;
  for (const Processors& node : nodes) found += node.size();
  EXPECT_EQ(found, allowed().size());
}

TEST(NumaOrder, ThreadsAreSpreadInOrderAndByProcessors) {
  using Nodes = std::vector<size_t>;
  EXPECT_EQ(spread_over({}, 3), Nodes({0, 0, 0}));
  EXPECT_EQ(spread_over({{0, 1, 2}}, 2), Nodes({0, 0}));
  EXPECT_EQ(spread_over({{0, 1}, {2, 3}}, 4), Nodes({0, 0, 1, 1}));
  EXPECT_EQ(spread_over({{0, 1}, {2, 3}}, 2), Nodes({0, 1}));
  EXPECT_EQ(spread_over({{0, 1}, {2, 3}}, 1), Nodes({0}));
  EXPECT_EQ(spread_over({{0}, {1, 2, 3}}, 4), Nodes({0, 1, 1, 1}));
  EXPECT_EQ(spread_over({{0}, {1}}, 6), Nodes({0, 0, 0, 1, 1, 1}));  // more threads than processors
}

TEST(NumaOrder, NeighboursAreHelpedFirst) {
  EXPECT_EQ(helping_orders({0, 0, 0}), Lists({{0, 1, 2}, {1, 2, 0}, {2, 0, 1}}));
  EXPECT_EQ(helping_orders({0, 0, 1, 1}), Lists({{0, 1, 2, 3}, {1, 0, 2, 3}, {2, 3, 0, 1}, {3, 2, 0, 1}}));
}

TEST(NumaOrder, WorkersStayOnTheirNodeAndTheCallerIsLeftAlone) {
  const std::vector<int> before = allowed();
  if (before.size() < 2) GTEST_SKIP() << "needs two processors";
  ThreadPool pool(4, {{before[0]}, {before[1]}});
  std::mutex mutex;
  std::map<std::thread::id, std::vector<int>> where;
  std::atomic<int> arrived{0};
  std::vector<std::atomic<int>> seen(4);
  pool.parallel_for(4, 1, [&](size_t begin, size_t) {
    ++seen[begin];
    {
      std::lock_guard lock(mutex);
      where[std::this_thread::get_id()] = allowed();
    }
    ++arrived;  // nobody leaves before all are here, so that each thread has one
    for (int i = 0; i < 10000 && arrived < 4; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  for (const auto& count : seen) EXPECT_EQ(count, 1);
  std::map<std::vector<int>, int> counts;
  for (const auto& [thread, cpus] : where) ++counts[cpus];
  EXPECT_EQ(counts[before], 1);  // the caller
  EXPECT_EQ(counts[{before[0]}], 1);
  EXPECT_EQ(counts[{before[1]}], 2);
  EXPECT_EQ(allowed(), before);
}

}  // namespace
}  // namespace ds
