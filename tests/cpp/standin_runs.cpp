// With DS_TEST_DEVICE=standin the tests of a program run again and again: with each seed of the stand-in device, in its
// two modes. A test fails where the order of its operations has a fault. DS_STANDIN_SEED is the first seed, and
// DS_STANDIN_SEEDS is the number of seeds.
#include <gtest/gtest.h>

#include "every_case.h"
#include "test_device.h"

namespace ds {
namespace {

class StandinRuns : public testing::EmptyTestEventListener {
  void OnTestProgramStart(const testing::UnitTest&) override {
    GTEST_FLAG_SET(repeat, 2 * cases_of("DS_STANDIN_SEEDS", 200, 5));
  }
  void OnTestIterationStart(const testing::UnitTest&, int iteration) override {
    STANDIN(standin_choose)(static_cast<uint64_t>(first_ + iteration / 2), iteration % 2);
  }
  void OnTestEnd(const testing::TestInfo&) override {
    for (const std::string& text : standin_faults_found()) ADD_FAILURE() << text;
  }
  void OnTestProgramEnd(const testing::UnitTest&) override { STANDIN(standin_end)(); }

 private:
  const int first_ = cases_of("DS_STANDIN_SEED", 1, 1);
};

// Before main(): torch asks once who has pinned memory.
const bool listening = [] {
  if (!on_standin()) return false;
  STANDIN(standin_choose)(0, 0);
  testing::UnitTest::GetInstance()->listeners().Append(new StandinRuns);
  return true;
}();

}  // namespace
}  // namespace ds
