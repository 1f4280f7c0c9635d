// The CPU that runs CUDA kernels (tests/cpp/kernels/cuda_on_cpu): it runs right kernels without a complaint, and finds
// each planted fault with every seed. Its library is opened by itself: a test needs no environment variable.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "../stand_in.h"
#include "cuda_on_cpu/on_cpu.h"

namespace ds::kernels::test {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true, kThreadSanitizer = false;
#elif defined(__SANITIZE_THREAD__)
constexpr bool kAddressSanitizer = false, kThreadSanitizer = true;
#else
constexpr bool kAddressSanitizer = false, kThreadSanitizer = false;
#endif
constexpr unsigned kBlocks = 3, kSize = 64;

class CpuForCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    testing::GTEST_FLAG(death_test_style) = "threadsafe";
    library_ = dlopen(stand_in("planted_faults").c_str(), RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
    planted = function<decltype(planted)>("ds_planted");
    set_orders = function<decltype(set_orders)>("ds_cuda_on_cpu_set_orders");
    set_runner = function<decltype(set_runner)>("ds_cuda_on_cpu_set_runner");
  }
  // The error that was found; "" where none was. The numbers are 0, 1, ... before, and in `data` after.
  std::string run(const char* name) {
    data.resize(kBlocks * kSize);
    data.shrink_to_fit();
    std::iota(data.begin(), data.end(), 0.0f);
    const char* error = planted(name, data.data(), kBlocks);
    return error != nullptr ? error : "";
  }
  bool turned_round() const {
    for (unsigned i = 0; i < data.size(); ++i)
      if (data[i] != static_cast<float>(i / kSize * kSize + kSize - 1 - i % kSize)) return false;
    return true;
  }
  // "planted_faults.cu:<line>" of the comment "planted: <name>".
  static std::string line_of(const std::string& name) {
    // ccache makes __FILE__ relative to the build folder.
    const auto build = std::filesystem::path(stand_in("planted_faults")).parent_path().parent_path();
    std::ifstream file((build / __FILE__).parent_path() / "planted_faults.cu");
    std::string line;
    for (int number = 1; std::getline(file, line); ++number) {
      const std::string comment = "// planted: " + name;
      if (line.size() > comment.size() && line.compare(line.size() - comment.size(), comment.size(), comment) == 0)
        return "planted_faults.cu:" + std::to_string(number) + ":";
    }
    return "no such comment";
  }
  void expect_found(const char* name, const std::string& text) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      set_orders(seed, 4);
      const std::string error = run(name);
      EXPECT_NE(error.find(line_of(name)), std::string::npos) << "seed " << seed << ": " << error;
      EXPECT_NE(error.find(text), std::string::npos) << "seed " << seed << ": " << error;
      EXPECT_EQ(run("right"), "") << "seed " << seed;
      EXPECT_TRUE(turned_round()) << "seed " << seed;
    }
  }

  std::vector<float> data;
  const char* (*planted)(const char* name, float* data, unsigned blocks);
  void (*set_orders)(uint64_t, int);
  void (*set_runner)(CudaOnCpuRunner);

 private:
  template <typename Function>
  Function function(const char* name) {
    void* found = dlsym(library_, name);
    EXPECT_NE(found, nullptr) << name;
    return reinterpret_cast<Function>(found);
  }
  void* library_ = nullptr;
};

TEST_F(CpuForCudaTest, ABarrierInABranchIsFound) {
  expect_found("barrier in a branch", "waits for its block, of which thread");
}

TEST_F(CpuForCudaTest, AThreadThatReturnedBeforeABarrierIsFound) {
  expect_found("returned before a barrier", "of which thread 17 of block");
}

TEST_F(CpuForCudaTest, ALaneThatDoesNotComeIsFound) {
  expect_found("lane left out", "waits for the lanes 0xffffffff, of which lane 9 has returned");
}

TEST_F(CpuForCudaTest, AMissingBarrierIsFound) {
  if (kAddressSanitizer) return;  // finds accesses outside of arrays
  if (kThreadSanitizer) {
    for (uint64_t seed = 1; seed <= 20; ++seed)
      EXPECT_DEATH((set_orders(seed, 4), run("barrier missing")), "data race(.|\n)*planted_faults.cu") << seed;
  } else {
    expect_found("barrier missing", "depends on the order of threads");
  }
}

TEST_F(CpuForCudaTest, BlocksThatRaceAreFound) {
  if (kAddressSanitizer) return;
  if (kThreadSanitizer) {
    for (uint64_t seed = 1; seed <= 20; ++seed)
      EXPECT_DEATH((set_orders(seed, 4), run("blocks that write one number")), "data race") << seed;
  } else {
    expect_found("blocks that write one number", "depends on the order of threads");
  }
}

TEST_F(CpuForCudaTest, SharedMemoryThatNobodyFilledIsFound) {
  if (!kAddressSanitizer && !kThreadSanitizer)
    expect_found("shared memory not filled", "reads shared memory that no thread of its block has written");
}

TEST_F(CpuForCudaTest, AnIndexOneTooFarIsFound) {
  if (kAddressSanitizer) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      EXPECT_DEATH((set_orders(seed, 4), run("index one too far")), "heap-buffer-overflow(.|\n)*planted_faults.cu");
      EXPECT_DEATH((set_orders(seed, 4), run("index one too far in shared memory")), "use-after-poison");
    }
  } else if (!kThreadSanitizer) {
    expect_found("index one too far in shared memory", "reads outside of its shared arrays");
  }
}

TEST_F(CpuForCudaTest, ALaunchThatAGpuRefusesIsAnError) {
  const char* error = planted("right", nullptr, 0);
  ASSERT_NE(error, nullptr);
  EXPECT_NE(std::string(error).find("a launch of 0 blocks"), std::string::npos) << error;
  EXPECT_EQ(run("right"), "");
}

// A stand-in device does this: the launch is queued, and runs when its stream comes to it.
std::vector<std::pair<void (*)(void*), void*>> queued;

TEST_F(CpuForCudaTest, ARunnerMayQueueLaunches) {
  set_runner([](void*, void (*run)(void*), void* work) -> const char* {
    if (queued.size() == 2) return "no such stream";
    queued.emplace_back(run, work);
    return nullptr;
  });
  EXPECT_EQ(run("right"), "");
  EXPECT_FALSE(turned_round());
  ASSERT_EQ(queued.size(), 1u);
  queued[0].first(queued[0].second);
  EXPECT_TRUE(turned_round());
  EXPECT_EQ(run("lane left out"), "");
  EXPECT_EQ(run("right"), "no such stream");
  queued[1].first(queued[1].second);
  set_runner(nullptr);
  EXPECT_NE(run("right").find("of which lane 9 has returned"), std::string::npos);  // CUDA's errors come late, too
  EXPECT_EQ(run("right"), "");
}

}  // namespace
}  // namespace ds::kernels::test
