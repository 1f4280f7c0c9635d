// Kernels made of torch's operations, on CPU tensors, against the plain loops of kernels/ref: element for element the
// same bits, sums of many elements to the last digits. And which kernels a device gets.
#include "zero/any_kernels.h"

#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "../error_of.h"
#include "../optim/rule_tensors.h"
#include "zero/device_context.h"

namespace ds::zero {
namespace {

using kernels::KernelTable;
using kernels::Launch;
using kernels::Segment;
using kernels::StepScale;
using kernels::UpdateArgs;
using kernels::UpdateSegment;
using kernels::test::Buffer;
using kernels::test::kDtypes;
using kernels::test::kFloats;
using kernels::test::ref_table;
using kernels::test::same;
using kernels::test::where;
using optim::Rule;
using optim::test::run;
using optim::test::Tensor;

// Around the widths of registers and of the runs that the work is cut into.
constexpr size_t kSizes[] = {0, 1, 31, 32, 33, 255, 257, 1025, 16385};

const KernelTable& any() { return any_kernels(at::kCPU); }

TEST(AnyKernels, TheTableIsWhole) {
  kernels::test::expect_whole(any(), "any");
  EXPECT_EQ(any().device_error(), nullptr);
  EXPECT_EQ(any().last_error(), nullptr);
  for (size_t i = 0; any().update_name(i) != nullptr; ++i)
    EXPECT_NE(any().find_update(any().update_name(i)), nullptr) << any().update_name(i);
  for (const Rule& rule : optim::rules())
    for (const optim::Pass& pass : rule.passes) EXPECT_NE(any().find_update(pass.kernel.c_str()), nullptr);
}

TEST(AnyKernels, CopyAccumulateAndScaleEqualTheReference) {
  ThreadPool pool(3);
  for (DType dst : kDtypes) {
    for (DType src : kDtypes) {
      for (size_t n : kSizes) {
        for (size_t offset : {0, 1}) {
          for (int entry = 0; entry < 6; ++entry) {
            Buffer from(src, n, offset), want(dst, n, offset);
            from.randomize(1).add_specials();
            want.randomize(2);
            Buffer got = want;
            const auto run = [&](const KernelTable& t, Buffer& to) {
              const float factor = entry % 2 == 0 ? 0.3f : 1.0f;
              const Launch launch = {n > 1000 ? &pool : nullptr, nullptr, nullptr};
              if (entry < 2) t.copy(launch, to.data(), dst, from.data(), src, n, factor);
              if (entry == 2 || entry == 3) t.accumulate(launch, to.data(), dst, from.data(), src, n, factor);
              if (entry > 3) t.scale(launch, to.data(), dst, n, factor);
            };
            run(ref_table(), want);
            run(any(), got);
            ASSERT_TRUE(same(got, want)) << where(any(), dst, src, n, offset) << " entry " << entry;
          }
        }
      }
    }
  }
  EXPECT_EQ(any().last_error(), nullptr);
}

TEST(AnyKernels, SumsEqualTheReferenceAndDoNotDependOnTheThreads) {
  for (DType dtype : kDtypes) {
    std::vector<Buffer> buffers;
    for (size_t n : kSizes) buffers.emplace_back(dtype, n, n % 2).randomize(static_cast<unsigned>(n));
    std::vector<Segment> segments;
    for (Buffer& one : buffers) segments.push_back({one.data(), one.size()});
    double want = 0.5;
    ref_table().sum_squares({}, segments.data(), segments.size(), dtype, &want);
    double first = 0;
    for (int threads : {1, 2, 5}) {
      ThreadPool pool(threads);
      double got = 0.5;
      any().sum_squares({&pool, nullptr, nullptr}, segments.data(), segments.size(), dtype, &got);
      EXPECT_NEAR(got, want, 1e-12 * want) << dtype_name(dtype);
      if (threads == 1) first = got;
      EXPECT_EQ(got, first) << threads << " threads";
    }
    for (double broken : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      buffers.back().set(7, broken);
      double got = 0;
      any().sum_squares({}, segments.data(), segments.size(), dtype, &got);
      EXPECT_FALSE(std::isfinite(got));
    }
  }
  for (const double sum : {4.0, 0.0, static_cast<double>(INFINITY), static_cast<double>(NAN)}) {
    for (const double failed : {0.0, 2.0}) {
      for (const float most : {0.0f, 1.0f}) {
        StepScale want = {}, got = {};
        ref_table().finish_norm({}, &sum, &failed, 2.0f, most, true, &want);
        any().finish_norm({}, &sum, &failed, 2.0f, most, true, &got);
        EXPECT_EQ(std::memcmp(&got, &want, sizeof got), 0) << sum;
        any().finish_norm({}, &sum, nullptr, 2.0f, most, true, &got);
        EXPECT_EQ(got.skip, std::isfinite(sum) ? 0 : kernels::kSkipNotFinite);
      }
    }
  }
}

TEST(AnyKernels, ColumnSumsEqualTheReference) {
  for (DType dtype : kDtypes) {
    for (size_t n : kSizes) {
      for (size_t columns : {size_t{1}, size_t{7}, size_t{1000}}) {
        for (size_t first : {size_t{0}, columns / 2}) {
          Buffer data(dtype, n, 1), want(DType::kF64, columns);
          data.randomize(3);
          want.randomize(4);
          Buffer got = want;
          ref_table().column_sums({}, data.data(), dtype, n, first, columns, static_cast<double*>(want.data()));
          any().column_sums({}, data.data(), dtype, n, first, columns, static_cast<double*>(got.data()));
          EXPECT_TRUE(got.canary_intact());
          for (size_t i = 0; i < columns; ++i)
            ASSERT_NEAR(got.get(i), want.get(i), 1e-12 * (1 + std::abs(want.get(i))))
                << where(any(), dtype, dtype, n, 1) << " columns " << columns;
        }
      }
    }
  }
}

// Differences of one value in fp32, and of neighbours in 16 bits: the last digit of torch's operations differs between
// its versions.
testing::AssertionResult near(const Tensor& got, const Tensor& want) {
  for (size_t b = 0; b < got.buffers.size(); ++b) {
    const auto &mine = got.buffers[b], &theirs = want.buffers[b];
    const DType dtype = theirs.dtype();
    const double share = dtype == DType::kBF16 ? 1.0 / 128 : dtype == DType::kF16 ? 1.0 / 1024 : 1e-6;
    for (size_t i = 0; i < theirs.size(); ++i) {
      const double x = mine.get(i), y = theirs.get(i);
      const bool equal = x == y || (std::isnan(x) && std::isnan(y));
      if (!equal && !(std::abs(x - y) <= share * std::max(1.0, std::abs(y))))
        return testing::AssertionFailure() << "element " << i << ": " << x << ", not " << y << " (buffer " << b << ")";
    }
  }
  return testing::AssertionSuccess();
}

TEST(AnyKernels, EveryRuleEqualsTheReference) {
  ThreadPool pool(3);
  const StepScale scale = {0, 0.7f, 0}, skip = {0, 0.7f, kernels::kSkipNotFinite};
  for (const Rule& rule : optim::test::plain_rules()) {
    for (DType grad : kFloats) {
      for (DType other : kFloats) {
        for (int form = 0; form < 3; ++form) {  // fp32 weights; narrow ones; those rounded at random
          UpdateArgs args;
          args.grad_dtype = grad;
          args.lp_dtype = other;
          args.master_dtype = args.state_dtype = form == 0 ? DType::kF32 : other;
          args.stochastic = form == 2;
          args.seed = 77;
          std::vector<Tensor> want;
          for (size_t n : kSizes) {
            want.emplace_back(rule, n, args, static_cast<unsigned>(n), n % 3, n % 2 == 0);
            if (n % 4 == 1) want.back().buffers[1].add_specials();
          }
          std::vector<Tensor> got(want.begin(), want.end()), untouched(want.begin(), want.end());
          std::vector<UpdateSegment> host, segments, unused;
          for (size_t i = 0; i < want.size(); ++i) {
            host.push_back(want[i].segment(i));
            segments.push_back(got[i].segment(i));
          }
          run(rule, any(), {&pool}, segments, args, &skip);
          for (size_t i = 0; i < want.size(); ++i) ASSERT_TRUE(optim::test::same(got[i], untouched[i])) << rule.name;
          run(rule, ref_table(), {}, host, args, &scale);
          run(rule, any(), {&pool}, segments, args, &scale);
          for (size_t i = 0; i < want.size(); ++i)
            ASSERT_TRUE(near(got[i], want[i]))
                << optim::test::where(rule, any(), args, want[i].numel(), i % 3) << " form " << form;
        }
      }
    }
  }
  EXPECT_EQ(any().last_error(), nullptr);
}

TEST(AnyKernels, EightBitStatesEqualTheReference) {
  for (size_t n : kSizes) {
    Buffer weights(DType::kF32, n), grad(DType::kF32, n);
    weights.randomize(1);
    std::vector<unsigned char> codes[4];
    std::vector<float> maxima[4];
    Buffer other = weights;
    const auto segment_of = [&](Buffer& master, int k) {
      UpdateSegment made;
      made.master = master.data();
      made.grad = grad.data();
      made.numel = n;
      for (int state = 0; state < 2; ++state) {
        codes[k + state].resize(n, 0);
        maxima[k + state].resize((n + 255) / 256, 0.0f);
        made.states[state] = codes[k + state].data();
        made.states[2 + state] = maxima[k + state].data();
      }
      return made;
    };
    const UpdateSegment want = segment_of(weights, 0), got = segment_of(other, 2);
    const StepScale scale = {0, 0.7f, 0};
    for (int step = 1; step <= 3; ++step) {
      grad.randomize(static_cast<unsigned>(step) + 7);
      const std::vector<double> hyper = {1e-2, 0.9, 0.99, 1e-8, 0.01, 1, 1};
      run_pass(ref_table(), {}, optim::find_rule("adam8bit"), optim::find_rule("adam8bit").passes[0], {want}, {}, hyper, step, &scale);
      run_pass(any(), {}, optim::find_rule("adam8bit"), optim::find_rule("adam8bit").passes[0], {got}, {}, hyper, step, &scale);
      EXPECT_TRUE(same(other, weights)) << n;
      EXPECT_EQ(codes[2], codes[0]) << n;
      EXPECT_EQ(maxima[3], maxima[1]) << n;
    }
  }
}

// As on a GPU: whoever has no memory says so and changes nothing.
class NoScratch final : public kernels::Scratch {
 public:
  void* allocate(size_t) noexcept override { return nullptr; }
};

TEST(AnyKernels, WithoutMemoryNothingIsChanged) {
  NoScratch none;
  const Launch launch = {nullptr, nullptr, &none};
  UpdateArgs args;
  for (const char* name : {"adam", "sgd"}) {
    const Rule& rule = optim::find_rule(name);
    Tensor want(rule, 1000, args, 5), got = want;
    run(rule, any(), launch, {got.segment()}, args, nullptr);
    EXPECT_TRUE(optim::test::same(got, want)) << name;
  }
  Buffer grad(DType::kBF16, 100);
  grad.randomize(1);
  const Segment segment = {grad.data(), grad.size()};
  double sum = 3;
  any().sum_squares(launch, &segment, 1, DType::kBF16, &sum);
  EXPECT_EQ(sum, 3);
}

TEST(AnyKernels, WhatTheReservedMemoryHoldsIsEnough) {
  const c10::Device cpu(at::kCPU);
  for (const int64_t n : {int64_t{1}, int64_t{1000}, int64_t{200000}}) {
    const size_t bytes = scratch_bytes(any(), cpu, 3, n);
    TorchScratch reserved(cpu, at::empty({static_cast<int64_t>(bytes)}, at::kByte));
    const void* first = reserved.allocate(1);
    struct Watched final : kernels::Scratch {
      TorchScratch& scratch;
      const void* first;
      bool enough = true;
      Watched(TorchScratch& scratch, const void* first) : scratch(scratch), first(first) {}
      void* allocate(size_t bytes) noexcept override {
        void* found = scratch.allocate(bytes);
        enough = enough && found == first;
        return found;
      }
    } watched(reserved, first);
    ThreadPool pool(3);
    for (const Rule& rule : optim::test::plain_rules()) {
      UpdateArgs args;
      args.master_dtype = args.state_dtype = args.grad_dtype = args.lp_dtype = DType::kBF16;
      Tensor tensor(rule, static_cast<size_t>(n), args, 3);
      run(rule, any(), {&pool, nullptr, &watched}, {tensor.segment()}, args, nullptr);
      const Segment segment = {tensor.buffers[1].data(), tensor.numel()};
      double sum = 0;
      any().sum_squares({&pool, nullptr, &watched}, &segment, 1, DType::kBF16, &sum);
      EXPECT_TRUE(watched.enough) << rule.name << " of " << n;
    }
  }
  EXPECT_EQ(scratch_bytes(cpu_library(), cpu, 3, 1000), 0u);
}

// The current value of a variable of the environment, put back at the end.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};

TEST(KernelsOfDevices, AreChosenByTheDeviceAndTheEnvironment) {
  const c10::Device cpu(at::kCPU);
  EXPECT_EQ(&kernels_of(cpu), &cpu_library());
  {
    const Variable any_body("DS_DEVICE_BODY", "any");
    EXPECT_EQ(&kernels_of(cpu), &any());
    EXPECT_TRUE(DeviceContext(cpu, 1).may_fail());
    EXPECT_FALSE(DeviceContext(1).may_fail());  // the host beside a device has its own
    EXPECT_EQ(&DeviceContext(1).table(), &cpu_library());
  }
  const Variable wrong("DS_DEVICE_BODY", "fast");
  const std::string said = error_of([&] { kernels_of(cpu); });
  EXPECT_TRUE(says(said, "DS_DEVICE_BODY is 'fast'")) << said;
  EXPECT_TRUE(says(said, "'any'")) << said;
}

TEST(KernelsOfDevices, ADeviceWithoutAGuardIsRefused) {
  for (const c10::Device device : {c10::Device(at::kMeta), c10::Device(at::kVulkan, 0)}) {
    const std::string said = error_of([&] { kernels_of(device); });
    EXPECT_TRUE(says(said, "has no guard for '" + c10::DeviceTypeName(device.type(), true) + "'")) << said;
  }
}

}  // namespace
}  // namespace ds::zero
