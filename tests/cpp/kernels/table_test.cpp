// The tables themselves: what is offered, what is refused and with which words.
#include <cstdlib>

#include "../error_of.h"
#include "base/cpu_features.h"
#include "support.h"

namespace ds::kernels::test {
namespace {

constexpr Isa kAll[] = {Isa::kScalar, Isa::kNeon, Isa::kSse4, Isa::kAvx2, Isa::kAvx512};

// Runs in a process of its own (GoogleTest's EXPECT_EXIT), because the choice is made once per process: a test that
// uses this must not touch a table itself.
[[noreturn]] void report_choice(const char* forced) {
  setenv("DS_FORCE_ISA", forced, 1);
  const KernelTable* table = ds_cpu_kernels(kKernelAbi);
  std::fputs(table != nullptr ? table->isa : ds_cpu_kernels_error(kKernelAbi), stderr);
  std::exit(0);
}

class TableTest : public testing::Test {
  void SetUp() override { testing::GTEST_FLAG(death_test_style) = "threadsafe"; }
};

TEST_F(TableTest, EveryIsaCanBeForced) {
  for (Isa isa : kAll) {
    if (!cpu_has(isa)) continue;
    EXPECT_EXIT(report_choice(isa_name(isa)), testing::ExitedWithCode(0), std::string("^") + isa_name(isa) + "$");
  }
}

TEST_F(TableTest, AWrongIsaIsAnErrorThatListsTheValidOnes) {
  EXPECT_EXIT(report_choice("mmx"), testing::ExitedWithCode(0), "DS_FORCE_ISA=mmx is not an instruction set.*scalar");
  const char* foreign = cpu_has(Isa::kNeon) ? "avx2" : "neon";
  EXPECT_EXIT(report_choice(foreign), testing::ExitedWithCode(0), "lacks.*Valid here: .*scalar");
}

TEST(KernelTableTest, NothingIsMissing) {
  const KernelTable* table = ds_cpu_kernels(kKernelAbi);
  ASSERT_NE(table, nullptr) << ds_cpu_kernels_error(kKernelAbi);
  EXPECT_EQ(ds_kernels(kKernelAbi, "cpu"), table);
  expect_whole(*table, "cpu");
  EXPECT_EQ(table->last_error(), nullptr);
  EXPECT_EQ(table->device_error(), nullptr);
}

TEST(KernelTableTest, AnotherAbiIsRefused) {
  EXPECT_EQ(ds_cpu_kernels(kKernelAbi + 1), nullptr);
  EXPECT_TRUE(says(std::string(ds_cpu_kernels_error(kKernelAbi + 1)), "another version"));
  EXPECT_EQ(ds_cpu_kernels_isa(kKernelAbi + 1, "ref"), nullptr);
  EXPECT_EQ(ds_cpu_kernels_isa(kKernelAbi, "mmx"), nullptr);
}

TEST(KernelTableTest, UnknownDevicesAreRefused) {
  EXPECT_EQ(ds_kernels(kKernelAbi, "abacus"), nullptr);
  EXPECT_TRUE(says(std::string(ds_kernels_error(kKernelAbi, "abacus")), "libds_kernels_abacus.so"));
  EXPECT_FALSE(ds_has_kernels("abacus"));
  EXPECT_TRUE(ds_has_kernels("cpu"));
}

}  // namespace
}  // namespace ds::kernels::test
