// Every registered rule, on every instruction set (and on the GPU where there is one), against the plain loops of
// kernels/ref, bit for bit: dtypes x sizes x alignments x threads. A new rule is tested here without a line of its own.
#include "optim/rule.h"

#include <algorithm>
#include <memory>

#include "../error_of.h"
#include "../every_case.h"
#include "../kernels/device.h"
#include "base/error.h"
#include "rule_tensors.h"

namespace ds::optim::test {
namespace {

using kernels::KernelTable;
using kernels::Launch;
using kernels::StepScale;
using kernels::UpdateArgs;
using kernels::UpdateSegment;
using kernels::test::Buffer;
using kernels::test::DriverScratch;
using kernels::test::isa_tables;
using kernels::test::kDtypes;
using kernels::test::kFloats;
using kernels::test::OnDevice;
using kernels::test::ref_table;

// A rule or a table as one of the values of a case: none of them moves while a test runs.
long long address(const void* pointer) { return reinterpret_cast<intptr_t>(pointer); }

TEST(RulesTest, EveryGradientDtypeAndSizeEqualsTheReference) {
  ThreadPool pool(3);
  NewPairs sample;  // of the large ones
  const StepScale scale = {0, 0.7f, 0};
  for (const Rule& rule : plain_rules()) {
    for (const KernelTable* table : isa_tables()) {
      for (DType grad : kDtypes) {
        for (DType lp : kDtypes) {
          for (size_t offset = 0; offset < 3; ++offset) {
            const bool large = sample({address(&rule), address(table), static_cast<int>(grad), static_cast<int>(lp),
                                       static_cast<int>(offset)});
            for (size_t n : {0, 1, 3, 15, 16, 17, 33, 1025, 40001}) {
              if (n > 1025 && !large) continue;
              UpdateArgs args;
              args.grad_dtype = grad;
              args.lp_dtype = lp;
              Tensor want(rule, n, args, 11, offset, offset != 1);
              if (offset == 2) want.buffers[1].add_specials();
              Tensor got = want;
              run(rule, ref_table(), {}, {want.segment()}, args, &scale);
              run(rule, *table, {&pool}, {got.segment()}, args, &scale);
              EXPECT_TRUE(same(got, want)) << where(rule, *table, args, n, offset);
            }
          }
        }
      }
    }
  }
}

TEST(RulesTest, WeightsAndStatesOfAnyDtype) {
  ThreadPool pool(2);
  NewPairs sample;  // of the large ones
  for (const Rule& rule : plain_rules()) {
    for (const KernelTable* table : isa_tables()) {
      for (DType master : kDtypes) {
        for (DType state : kDtypes) {
          for (bool stochastic : {false, true}) {
            UpdateArgs args;
            args.master_dtype = args.grad_dtype = master;
            args.state_dtype = state;
            args.lp_dtype = DType::kBF16;
            args.stochastic = stochastic;
            args.seed = 77;
            const bool large =
                sample({address(&rule), address(table), static_cast<int>(master), static_cast<int>(state), stochastic});
            for (size_t n : {1, 1023, 1024, 1025, 40000}) {
              if (n > 1025 && !large) continue;
              Tensor want(rule, n, args, 23, 1), got = want;
              run(rule, ref_table(), {}, {want.segment(5)}, args, nullptr);
              run(rule, *table, {&pool}, {got.segment(5)}, args, nullptr);
              EXPECT_TRUE(same(got, want)) << where(rule, *table, args, n, 1) << " stochastic " << stochastic;
            }
          }
        }
      }
    }
  }
}

TEST(RulesTest, ManySegmentsEqualOneByOne) {
  UpdateArgs args;
  args.lp_dtype = DType::kBF16;
  for (const Rule& rule : plain_rules()) {
    for (const KernelTable* table : isa_tables()) {
      for (int threads : {1, 2, 5}) {
        ThreadPool pool(threads);
        std::vector<Tensor> want;
        for (size_t n : {5, 0, 8192, 1, 0, 20001, 3, 9000, 64, 0, 70000, 70001, 65536})
          want.emplace_back(rule, n, args, static_cast<unsigned>(n), n % 4);
        std::vector<Tensor> got(want.begin(), want.end());
        std::vector<UpdateSegment> segments;
        for (Tensor& t : got) segments.push_back(t.segment());
        for (Tensor& t : want) run(rule, ref_table(), {}, {t.segment()}, args, nullptr);
        run(rule, *table, {&pool}, segments, args, nullptr);
        for (size_t i = 0; i < want.size(); ++i)
          EXPECT_TRUE(same(got[i], want[i])) << where(rule, *table, args, want[i].numel(), 0) << " segment " << i;
      }
    }
  }
}

TEST(RulesTest, ASkippedStepTouchesNothing) {
  const StepScale skip = {INFINITY, 1.0f, 1};
  const UpdateArgs args;
  for (const Rule& rule : plain_rules()) {
    for (const KernelTable* table : isa_tables()) {
      Tensor want(rule, 1000, args, 5), got = want;
      run(rule, *table, {}, {got.segment()}, args, &skip);
      EXPECT_TRUE(same(got, want)) << rule.name;
    }
  }
}

TEST(RulesTest, RandomRoundingIsRightOnAverage) {
  for (const Rule& rule : plain_rules()) {
    for (const KernelTable* table : isa_tables()) {
      UpdateArgs exact;
      exact.grad_dtype = exact.lp_dtype = DType::kBF16;
      UpdateArgs rounded = exact;
      rounded.master_dtype = DType::kBF16;
      rounded.stochastic = true;
      const size_t n = 20000;
      Tensor a(rule, n, exact, 9), b(rule, n, rounded, 9);
      for (size_t i = 0; i < n; ++i) a.buffers[0].set(i, b.buffers[0].get(i));
      const Tensor before = b;
      run(rule, *table, {}, {a.segment()}, exact, nullptr);
      double exact_change = 0, change = 0, spread = 0;
      for (uint64_t seed = 1; seed <= 8; ++seed) {
        Tensor copy = before;
        rounded.seed = seed;
        run(rule, *table, {}, {copy.segment()}, rounded, nullptr);
        for (size_t i = 0; i < n; ++i) {
          const double sign = a.buffers[0].get(i) < before.buffers[0].get(i) ? -1 : 1;
          exact_change += sign * (a.buffers[0].get(i) - before.buffers[0].get(i));
          change += sign * (copy.buffers[0].get(i) - before.buffers[0].get(i));
          spread += std::pow(copy.buffers[0].get(i) - a.buffers[0].get(i), 2);
        }
      }
      EXPECT_NEAR(change, exact_change, 5 * std::sqrt(spread)) << rule.name;  // five standard deviations
      EXPECT_GT(exact_change, 10 * std::sqrt(spread)) << rule.name << ": the test shows nothing";
    }
  }
}

TEST(RulesTest, UnknownNamesAreErrors) {
  EXPECT_TRUE(says(error_of([&] { find_rule("adamm"); }), "adam"));
  EXPECT_EQ(ref_table().find_update("adamm"), nullptr);
}

TEST(RulesTest, EveryRuleHasItsKernelsOnEveryDevice) {
  const KernelTable* cuda = ds_kernels(kernels::kKernelAbi, "cuda");
  for (const Rule& rule : plain_rules()) {
    for (const Pass& pass : rule.passes) {
      EXPECT_NE(ref_table().find_update(pass.kernel.c_str()), nullptr) << pass.kernel;
      if (cuda != nullptr) {
        EXPECT_NE(cuda->find_update(pass.kernel.c_str()), nullptr) << pass.kernel;
      }
    }
  }
}

using CudaRulesTest = kernels::test::CudaTest;
TEST_F(CudaRulesTest, TheBitsAreThoseOfTheReference) {
  for (const Rule& rule : plain_rules()) {
    for (DType grad : kDtypes) {
      for (DType other : kDtypes) {
        for (bool wide : {true, false}) {
          // On the CPU every pair of values, and more segments than a launch takes.
          const bool on_cpu = kernels::test::cuda_runs_on_cpu();
          if (on_cpu && wide != ((static_cast<int>(grad) + static_cast<int>(other)) % 2 == 0)) continue;
          UpdateArgs args;
          args.grad_dtype = grad;
          args.lp_dtype = other;
          args.master_dtype = args.state_dtype = wide ? DType::kF32 : other;
          args.stochastic = !wide;
          std::vector<Tensor> want;
          const std::vector<size_t> lengths = sizes();
          for (size_t i = 0; i < (on_cpu ? 70 : 150); ++i)
            want.emplace_back(rule, lengths[i % lengths.size()], args, static_cast<unsigned>(5 * i), i % 3 == 0,
                              i % 2 == 0);
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
          run(rule, ref_table(), {}, host, args, &scale);
          Buffer scales(DType::kF64, 2 * sizeof(StepScale) / 8);
          std::memcpy(scales.data(), &scale, sizeof scale);
          std::memcpy(static_cast<char*>(scales.data()) + sizeof scale, &skip, sizeof skip);
          OnDevice on(driver, scales);
          const StepScale* device_scales = static_cast<StepScale*>(on.data());
          DriverScratch scratch(driver);
          Launch launch;
          launch.scratch = &scratch;
          run(rule, *table, launch, device, args, device_scales + 1);  // skipped: changes nothing
          run(rule, *table, launch, device, args, device_scales);
          for (auto& copy : copies) copy->fetch();
          expect_no_error();
          for (size_t i = 0; i < got.size(); ++i)
            ASSERT_TRUE(same(got[i], want[i])) << where(rule, *table, args, want[i].numel(), i);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ds::optim::test
