// The rules whose ranks exchange signs: every pass of every phase on every instruction set, and on CUDA, against the
// plain loops of kernels/ref; and the steps at which something travels.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "../kernels/device.h"
#include "kernels/onebit_lamb.h"
#include "optim/rule.h"
#include "optim/zero_one_schedule.h"
#include "rule_tensors.h"

namespace ds::optim::test {
namespace {

using kernels::test::DriverScratch;
using kernels::test::isa_tables;
using kernels::test::kDtypes;
using kernels::test::OnDevice;
using kernels::test::ref_table;

// Each phase as a rule of its own, whose buffers beside the states are states.
std::vector<Rule> phases() {
  std::vector<Rule> found;
  for (const Rule& rule : rules()) {
    for (size_t number = 0; number < rule.phases.size(); ++number) {
      Rule one = rule;
      one.passes = rule.phases[number].passes;
      one.name += " phase " + std::to_string(number);
      one.scratch = true;
      for (const Beside& beside : rule.beside) one.slots.push_back(beside.name);
      found.push_back(one);
    }
  }
  return found;
}

std::vector<double> values_of(const Rule& rule) {
  std::vector<double> values = defaults(rule);
  for (size_t i = 0; i < values.size(); ++i)
    if (rule.hyper[i].name == "lr_sum") values[i] = 0.003;
  return values;
}

// The scratch and the kept numbers have values, too.
Tensor tensor_of(const Rule& rule, size_t n, const UpdateArgs& args, unsigned seed, size_t offset, bool lp) {
  Tensor made(rule, n, args, seed, offset, lp);
  made.buffers[3].randomize(seed + 40, 0.1);
  for (int i = 2; i < rule.sums; ++i) made.buffers[4].set(static_cast<size_t>(i), 0.5 + 0.25 * i);
  return made;
}

void run_phase(const Rule& rule, const KernelTable& table, const Launch& launch,
               const std::vector<UpdateSegment>& segments, const UpdateArgs& args, const StepScale* scale) {
  for (const Pass& pass : rule.passes) run_pass(table, launch, rule, pass, segments, args, values_of(rule), 3, scale);
}

TEST(OneBitRulesTest, EveryPhaseEqualsTheReference) {
  ThreadPool pool(3);
  const StepScale scale = {0, 0.7f, 0};
  ASSERT_EQ(phases().size(), 2u + 3u + 4u);
  for (const Rule& rule : phases()) {
    for (const KernelTable* table : isa_tables()) {
      for (DType grad : kDtypes) {
        for (size_t n : {0, 1, 3, 15, 17, 1025, 40001}) {
          UpdateArgs args;
          args.grad_dtype = grad;
          args.lp_dtype = grad == DType::kBF16 ? DType::kF16 : DType::kBF16;
          args.master_dtype = n == 1025 ? DType::kBF16 : DType::kF32;
          Tensor want = tensor_of(rule, n, args, 11, n % 3, n % 2 == 1), got = want;
          run_phase(rule, ref_table(), {}, {want.segment()}, args, &scale);
          run_phase(rule, *table, {&pool}, {got.segment()}, args, &scale);
          EXPECT_TRUE(same(got, want)) << where(rule, *table, args, n, n % 3);
        }
      }
    }
  }
}

TEST(OneBitRulesTest, ASkippedStepTouchesNothing) {
  const StepScale skip = {INFINITY, 1.0f, 1};
  for (const Rule& rule : phases()) {
    for (const KernelTable* table : isa_tables()) {
      Tensor want = tensor_of(rule, 1000, {}, 5, 0, true), got = want;
      run_phase(rule, *table, {}, {got.segment()}, {}, &skip);
      EXPECT_TRUE(same(got, want)) << rule.name << " " << table->isa;
    }
  }
}

using CudaOneBitRulesTest = kernels::test::CudaTest;
TEST_F(CudaOneBitRulesTest, TheBitsAreThoseOfTheReference) {
  for (const Rule& rule : phases()) {
    UpdateArgs args;
    args.grad_dtype = args.lp_dtype = DType::kBF16;
    std::vector<Tensor> want;
    for (size_t i = 0; i < 40; ++i)
      want.push_back(tensor_of(rule, std::vector<size_t>{1, 7, 0, 1024, 33000, 12}[i % 6], args,
                               static_cast<unsigned>(5 * i), i % 3 == 0, i % 2 == 0));
    std::vector<Tensor> got(want.begin(), want.end());
    std::vector<std::unique_ptr<OnDevice>> copies;
    std::vector<UpdateSegment> host, device;
    for (size_t i = 0; i < got.size(); ++i) {
      const size_t first = copies.size();
      for (Buffer& buffer : got[i].buffers) copies.push_back(std::make_unique<OnDevice>(driver, buffer));
      host.push_back(want[i].segment(i));
      device.push_back(got[i].segment([&](size_t k) { return copies[first + k]->data(); }, i));
    }
    const StepScale scale = {1, 0.7f, 0}, skip = {1, 0.7f, 1};
    run_phase(rule, ref_table(), {}, host, args, &scale);
    Buffer scales(DType::kF64, 2 * sizeof(StepScale) / 8);
    std::memcpy(scales.data(), &scale, sizeof scale);
    std::memcpy(static_cast<char*>(scales.data()) + sizeof scale, &skip, sizeof skip);
    OnDevice on(driver, scales);
    const StepScale* device_scales = static_cast<StepScale*>(on.data());
    DriverScratch scratch(driver);
    Launch launch;
    launch.scratch = &scratch;
    run_phase(rule, *table, launch, device, args, device_scales + 1);  // skipped: changes nothing
    run_phase(rule, *table, launch, device, args, device_scales);
    for (auto& copy : copies) copy->fetch();
    expect_no_error();
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_TRUE(same(got[i], want[i])) << where(rule, *table, args, want[i].numel(), i);
  }
}

TEST(OneBitLambTest, TheFactorIsBounded) {
  kernels::OneBitLambConstants c{};
  c.factor_min = 0.5, c.factor_max = 4, c.factor_threshold = 0.1;
  const auto factor = [&](double largest, double last, double decay, double direction = 1, double update = 1) {
    c.lamb.decay = static_cast<float>(decay);
    double sums[kernels::onebit_lamb::kNumbers] = {direction, update, largest, 2, 1, last};
    factor_of_lamb(sums, c);
    EXPECT_DOUBLE_EQ(sums[kernels::onebit_lamb::kRatio], 2 * sums[kernels::onebit_lamb::kLast]);
    return sums[kernels::onebit_lamb::kLast];
  };
  EXPECT_DOUBLE_EQ(factor(1.05, 1, 0), 1.05);
  EXPECT_DOUBLE_EQ(factor(9, 1, 0), 1.1);    // the threshold
  EXPECT_DOUBLE_EQ(factor(0.2, 1, 0), 0.9);  // the same, down
  EXPECT_DOUBLE_EQ(factor(9, 3.9, 0), 4);    // the bounds
  EXPECT_DOUBLE_EQ(factor(0.1, 0.52, 0), 0.5);
  EXPECT_DOUBLE_EQ(factor(1.08, 1, 0.01, 1, 4), 1.04);  // half of the update is Adam's direction
  EXPECT_DOUBLE_EQ(factor(1.08, 1, 0.01, 4, 1), 1.08);  // a share is at most 1
}

TEST(ZeroOneScheduleTest, UpdatesOfTheVarianceFollowTheFormula) {
  for (int64_t scaler : {1, 2, 3, 16}) {
    int64_t next = 1, done = 1;  // k(1) = 1
    for (int64_t update = 1; update < 5000; ++update) {
      EXPECT_EQ(updates_variance(update, scaler), update == next) << update << " scaler " << scaler;
      if (update != next) continue;
      next += int64_t{1} << (done / scaler);
      ++done;
    }
  }
}

TEST(ZeroOneScheduleTest, SyncsFollowTheFormula) {
  for (int64_t scaler : {1, 2, 5, 100, 32678}) {
    for (int64_t longest : {1, 2, 5, 16, 64}) {
      int64_t next = 1;
      for (int64_t step = 1; step < 3000; ++step) {
        EXPECT_EQ(syncs_weights(step, scaler, longest), step == next) << step << ": " << scaler << ", " << longest;
        if (step != next) continue;
        int64_t interval = 1;
        for (int64_t i = 0; i < step / scaler && interval < longest; ++i) interval *= 2;
        next += std::min(interval, longest);
      }
    }
  }
}

TEST(OneBitRulesTest, TheNumberOfTheUpdateDecidesThePhase) {
  const auto phases_of = [](const char* name, const std::map<std::string, double>& given, int updates) {
    const Rule& rule = find_rule(name);
    std::vector<double> hyper;
    for (const Hyperparameter& one : rule.hyper)
      hyper.push_back(given.count(one.name) ? given.at(one.name) : one.fallback);
    std::string found;
    for (int update = 1; update <= updates; ++update)
      found += std::to_string(rule.phase(hyper, update) - rule.phases.data());
    return found;
  };
  EXPECT_EQ(phases_of("onebit_adam", {{"freeze_step", 3}}, 6), "000111");
  EXPECT_EQ(phases_of("onebit_lamb", {{"freeze_step", 3}}, 6), "000122");
  // Variance at 1, 2, 4, 6, then local steps with syncs at 1, 2, 4, 8, 12.
  EXPECT_EQ(
      phases_of("zero_one_adam",
                {{"var_freeze_step", 6}, {"var_update_scaler", 2}, {"local_step_scaler", 2}, {"local_step_clipper", 4}},
                18),
      "001010"
      "332322232223");
}

}  // namespace
}  // namespace ds::optim::test
