#include <numeric>

#include "support.h"

namespace ds::kernels::test {
namespace {

double sum_of(const KernelTable& table, ThreadPool* pool, const std::vector<Buffer>& buffers, DType dtype) {
  std::vector<Segment> segments;
  for (const Buffer& b : buffers) segments.push_back({const_cast<void*>(b.data()), b.size()});
  double sum = 0;
  table.sum_squares({pool}, segments.data(), segments.size(), dtype, &sum);
  return sum;
}

std::vector<Buffer> some_segments(DType dtype) {
  std::vector<Buffer> buffers;
  unsigned seed = 0;
  for (size_t n : {70001, 0, 1, 33, 16384, 16385, 500, 31}) {
    buffers.emplace_back(dtype, n, seed % 3);
    buffers.back().randomize(++seed);
  }
  return buffers;
}

TEST(SumSquaresTest, TheReferenceIsRight) {
  for (DType dtype : kDtypes) {
    const std::vector<Buffer> buffers = some_segments(dtype);
    long double expected = 0;
    for (const Buffer& b : buffers)
      for (size_t i = 0; i < b.size(); ++i) expected += static_cast<long double>(b.get(i)) * b.get(i);
    EXPECT_NEAR(sum_of(ref_table(), nullptr, buffers, dtype), static_cast<double>(expected), 1e-12 * expected);
  }
}

// The same bits for every instruction set and every number of threads.
TEST(SumSquaresTest, EveryIsaAndThreadCountGivesTheSameBits) {
  for (DType dtype : kDtypes) {
    const std::vector<Buffer> buffers = some_segments(dtype);
    const double expected = sum_of(ref_table(), nullptr, buffers, dtype);
    for (const KernelTable* table : isa_tables()) {
      EXPECT_EQ(sum_of(*table, nullptr, buffers, dtype), expected) << table->isa << " " << dtype_name(dtype);
      for (int threads : {1, 2, 3, 8}) {
        ThreadPool pool(threads);
        EXPECT_EQ(sum_of(*table, &pool, buffers, dtype), expected) << table->isa << " threads " << threads;
      }
    }
  }
}

TEST(SumSquaresTest, EveryLength) {
  for (const KernelTable* table : isa_tables()) {
    for (DType dtype : kDtypes) {
      for (size_t n : kSizes) {
        Buffer b(dtype, n, 1);
        b.randomize(static_cast<unsigned>(n));
        EXPECT_EQ(sum_of(*table, nullptr, {b}, dtype), sum_of(ref_table(), nullptr, {b}, dtype))
            << where(*table, dtype, dtype, n, 1);
      }
    }
  }
}

TEST(SumSquaresTest, AddsToWhatIsThere) {
  for (const KernelTable* table : isa_tables()) {
    float x[3] = {1, 2, 3};
    const Segment segment = {x, 3};
    double sum = 0.5;
    table->sum_squares({}, &segment, 1, DType::kF32, &sum);
    EXPECT_EQ(sum, 14.5);
    table->sum_squares({}, &segment, 0, DType::kF32, &sum);
    table->sum_squares({}, nullptr, 0, DType::kF32, &sum);
    EXPECT_EQ(sum, 14.5);
  }
}

TEST(SumSquaresTest, ANanOrInfAnywhereShows) {
  ThreadPool pool(2);
  for (const KernelTable* table : isa_tables()) {
    for (DType dtype : kDtypes) {
      for (size_t position : {0, 31, 32, 16383, 16384, 40000}) {
        Buffer b(dtype, 40001);
        b.randomize(9);
        b.set(position, NAN);
        EXPECT_TRUE(std::isnan(sum_of(*table, &pool, {b}, dtype)));
        b.set(position, -INFINITY);
        EXPECT_EQ(sum_of(*table, &pool, {b}, dtype), INFINITY);
      }
    }
  }
}

// Squares that overflow fp32 must not: the accumulator is fp64.
TEST(SumSquaresTest, LargeAndSmallNumbers) {
  for (const KernelTable* table : isa_tables()) {
    float x[2] = {3e38f, 1e-30f};
    const Segment large = {x, 1}, small = {x + 1, 1};
    double sum = 0;
    table->sum_squares({}, &large, 1, DType::kF32, &sum);
    EXPECT_EQ(sum, double(x[0]) * x[0]);
    sum = 0;
    table->sum_squares({}, &small, 1, DType::kF32, &sum);
    EXPECT_EQ(sum, double(x[1]) * x[1]);
  }
}

StepScale finish(double sum, float loss_scale, float max_norm, bool check, const double* failed = nullptr) {
  StepScale out = {-1, -1, -1};
  ds_cpu_kernels(kKernelAbi)->finish_norm({}, &sum, failed, loss_scale, max_norm, check, &out);
  return out;
}

TEST(FinishNormTest, UnscalesAndClips) {
  StepScale out = finish(25.0, 1.0f, 0.0f, false);
  EXPECT_EQ(out.norm, 5.0);
  EXPECT_EQ(out.grad_scale, 1.0f);
  EXPECT_EQ(out.skip, 0);
  out = finish(25.0, 2.0f, 10.0f, true);  // norm 2.5, below the limit
  EXPECT_EQ(out.norm, 2.5);
  EXPECT_EQ(out.grad_scale, 0.5f);
  out = finish(100.0, 2.0f, 1.0f, true);  // norm 5, five times the limit
  EXPECT_EQ(out.norm, 5.0);
  EXPECT_FLOAT_EQ(out.grad_scale, static_cast<float>(0.5 * 1.0 / (5.0 + 1e-6)));
  out = finish(0.0, 1.0f, 1.0f, true);
  EXPECT_EQ(out.norm, 0.0);
  EXPECT_EQ(out.grad_scale, 1.0f);
}

TEST(FinishNormTest, SkipsOnlyWhenAsked) {
  for (double bad : {static_cast<double>(INFINITY), static_cast<double>(NAN)}) {
    EXPECT_EQ(finish(bad, 1.0f, 1.0f, true).skip, 1);
    EXPECT_EQ(finish(bad, 1.0f, 1.0f, false).skip, 0);
    EXPECT_FALSE(std::isfinite(finish(bad, 1.0f, 0.0f, true).norm));
  }
}

TEST(FinishNormTest, SkipsWhereSomebodyHasFailed) {
  const double nobody = 0, two = 2;
  for (bool check : {false, true}) {
    EXPECT_EQ(finish(4.0, 1.0f, 1.0f, check, &nobody).skip, 0);
    EXPECT_EQ(finish(4.0, 1.0f, 1.0f, check, &two).skip, kSkipFailed);
    EXPECT_EQ(finish(NAN, 1.0f, 1.0f, check, &two).skip, kSkipFailed);
  }
}

// Each array has a word of its own, and bits that are there stay.
TEST(NonfiniteTest, NamesTheArraysWithAnInfOrANan) {
  ThreadPool pool(3);
  for (const KernelTable* table : isa_tables()) {
    for (DType dtype : kDtypes) {
      std::vector<Buffer> buffers;
      std::vector<int32_t> found(300), want(300);
      for (size_t i = 0; i < found.size(); ++i) {
        const size_t n = kSizes[i % 10];
        buffers.emplace_back(dtype, n, i % 2);
        buffers.back().randomize(static_cast<unsigned>(i));
        found[i] = want[i] = i % 11 == 0 ? 4 : 0;
        if (n > 0 && i % 3 == 0) buffers.back().set(n - 1, INFINITY), want[i] |= kFoundInf;
        if (n > 0 && i % 5 == 0) buffers.back().set(0, NAN), want[i] |= kFoundNan;
        if (n == 1 && i % 15 == 0) want[i] &= ~kFoundInf;  // the nan has taken its place
      }
      std::vector<Checked> arrays;
      for (size_t i = 0; i < found.size(); ++i) arrays.push_back({buffers[i].data(), buffers[i].size(), &found[i]});
      table->find_nonfinite({&pool}, arrays.data(), arrays.size(), dtype);
      EXPECT_EQ(found, want) << table->isa << " " << dtype_name(dtype);
    }
  }
}

}  // namespace
}  // namespace ds::kernels::test
