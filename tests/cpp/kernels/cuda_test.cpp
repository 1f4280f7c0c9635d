// The CUDA table: that it is there and says clearly what is missing without a GPU; with one, that every entry gives
// the bits of the reference (update kernels: tests/cpp/optim/rules_test.cpp).
#include <memory>

#include "../error_of.h"
#include "device.h"
#include "support.h"

namespace ds::kernels::test {
namespace {

const KernelTable* cuda_table() { return ds_kernels(kKernelAbi, "cuda"); }

TEST(CudaTableTest, LoadsWithoutAGpu) {
  const KernelTable* table = cuda_table();
  if (table == nullptr) {
    const std::string error = ds_kernels_error(kKernelAbi, "cuda");
    ASSERT_TRUE(says(error, "cannot be loaded"));
    GTEST_SKIP() << error;
  }
  expect_whole(*table, "cuda");
  EXPECT_EQ(ds_kernels(kKernelAbi + 1, "cuda"), nullptr);
  EXPECT_TRUE(says(std::string(ds_kernels_error(kKernelAbi + 1, "cuda")), "another version"));
}

TEST(CudaTableTest, WithoutAGpuALaunchIsAReadableError) {
  const KernelTable* table = cuda_table();
  if (table == nullptr) GTEST_SKIP() << ds_kernels_error(kKernelAbi, "cuda");
  if (table->device_error() == nullptr) GTEST_SKIP() << "this machine has a GPU";
  const std::string reason = table->device_error();
  float x = 1;
  table->scale({}, &x, DType::kF32, 1, 2.0f);
  EXPECT_EQ(table->last_error(), reason);
  EXPECT_EQ(x, 1.0f);
}

// A missing or foreign library is an error text, not a crash. Needs a process of its own: the library is opened once.
[[noreturn]] void report_missing(const char* path) {
  setenv("DS_CUDA_KERNELS", path, 1);
  std::fputs(cuda_table() != nullptr ? "loaded" : ds_kernels_error(kKernelAbi, "cuda"), stderr);
  std::exit(0);
}

TEST(CudaTableTest, AMissingLibraryIsAReadableError) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(report_missing("/nowhere/lib.so"), testing::ExitedWithCode(0), "/nowhere/lib.so.*toolkit.*make");
  EXPECT_EXIT(report_missing("libm.so.6"), testing::ExitedWithCode(0), "is not a kernel library");
}

TEST_F(CudaTest, CopyAccumulateAndScaleEqualTheReference) {
  for (DType dst : kDtypes) {
    for (DType src : kDtypes) {
      for (size_t n : sizes()) {
        for (size_t offset : {0, 1}) {
          for (int entry = 0; entry < 4; ++entry) {
            Buffer from(src, n, offset), want(dst, n, offset);
            from.randomize(1).add_specials();
            want.randomize(2);
            Buffer got = want;
            const auto run = [&](const KernelTable& t, void* to, void* source) {
              if (entry == 0) t.copy({}, to, dst, source, src, n, 0.3f);
              if (entry == 1) t.copy({}, to, dst, source, src, n, 1.0f);
              if (entry == 2) t.accumulate({}, to, dst, source, src, n, 0.3f);
              if (entry == 3) t.scale({}, to, dst, n, 0.3f);
            };
            run(ref_table(), want.data(), from.data());
            OnDevice a(driver, from), b(driver, got);
            run(*table, b.data(), a.data());
            b.fetch();
            expect_no_error();
            ASSERT_TRUE(same(got, want)) << where(*table, dst, src, n, offset) << " entry " << entry;
          }
        }
      }
    }
  }
}

TEST_F(CudaTest, ManyMovesEqualTheReference) {
  for (DType to : kDtypes) {
    for (DType from : kDtypes) {
      for (bool add : {false, true}) {
        const ManyMoves many(to, from);
        Buffer want = many.target, got = many.target, source = many.source;
        const std::vector<Move> moves = many.moves(want.data(), source.data());
        ref_table().move_all({}, moves.data(), moves.size(), to, from, 0.3f, add);
        OnDevice a(driver, source), b(driver, got);
        const std::vector<Move> there = many.moves(b.data(), a.data());
        table->move_all({}, there.data(), there.size(), to, from, 0.3f, add);
        b.fetch();
        expect_no_error();
        ASSERT_TRUE(same(got, want)) << where(*table, to, from, many.target.size(), 1) << " add " << add;
      }
    }
  }
}

TEST_F(CudaTest, FindNonfiniteEqualsTheReference) {
  for (DType dtype : kDtypes) {
    const std::vector<size_t> lengths = sizes();
    std::vector<Buffer> buffers;
    for (size_t i = 0; i < 200; ++i) {
      const size_t n = lengths[i % lengths.size()];
      buffers.emplace_back(dtype, n, i % 2);
      buffers.back().randomize(static_cast<unsigned>(i));
      if (n > 0 && i % 3 == 0) buffers.back().set(n - 1, INFINITY);
      if (n > 0 && i % 7 == 0) buffers.back().set(n / 2, NAN);
    }
    Buffer want(DType::kF32, buffers.size()), got(DType::kF32, buffers.size());  // words of 32 bits
    std::memset(want.data(), 0, want.bytes());
    std::memset(got.data(), 0, got.bytes());
    OnDevice bits(driver, got);
    std::vector<Checked> host, device;
    std::vector<std::unique_ptr<OnDevice>> copies;
    for (size_t i = 0; i < buffers.size(); ++i) {
      copies.push_back(std::make_unique<OnDevice>(driver, buffers[i]));
      host.push_back({buffers[i].data(), buffers[i].size(), static_cast<int32_t*>(want.data()) + i});
      device.push_back({copies.back()->data(), buffers[i].size(), static_cast<int32_t*>(bits.data()) + i});
    }
    ref_table().find_nonfinite({}, host.data(), host.size(), dtype);
    table->find_nonfinite({}, device.data(), device.size(), dtype);
    bits.fetch();
    expect_no_error();
    ASSERT_EQ(std::memcmp(want.data(), got.data(), want.bytes()), 0) << dtype_name(dtype);
  }
}

TEST_F(CudaTest, ColumnSumsEqualTheReference) {
  for (DType dtype : kDtypes) {
    for (size_t n : sizes()) {
      for (size_t columns : {size_t{1}, size_t{7}, size_t{1000}}) {
        Buffer data(dtype, n, 1), want(DType::kF64, columns);
        data.randomize(3);
        want.randomize(4);
        Buffer got = want;
        const size_t first = columns / 2;
        ref_table().column_sums({}, data.data(), dtype, n, first, columns, static_cast<double*>(want.data()));
        OnDevice a(driver, data), b(driver, got);
        table->column_sums({}, a.data(), dtype, n, first, columns, static_cast<double*>(b.data()));
        b.fetch();
        expect_no_error();
        ASSERT_TRUE(same(got, want)) << where(*table, dtype, dtype, n, 1) << " columns " << columns;
      }
    }
  }
}

TEST_F(CudaTest, SumSquaresAndFinishNormEqualTheReference) {
  for (DType dtype : kDtypes) {
    const std::vector<size_t> lengths = sizes();
    std::vector<Buffer> buffers;
    for (size_t i = 0; i < 300; ++i) {  // more than one launch takes
      buffers.emplace_back(dtype, lengths[i % lengths.size()], i % 2);
      buffers.back().randomize(static_cast<unsigned>(i));
    }
    std::vector<Segment> host, device;
    std::vector<std::unique_ptr<OnDevice>> copies;
    for (Buffer& b : buffers) {
      copies.push_back(std::make_unique<OnDevice>(driver, b));
      host.push_back({b.data(), b.size()});
      device.push_back({copies.back()->data(), b.size()});
    }
    double want = 0.5;
    ref_table().sum_squares({}, host.data(), host.size(), dtype, &want);
    Buffer sum(DType::kF64, 1);
    sum.set(0, 0.5);
    OnDevice on(driver, sum);
    DriverScratch scratch(driver);
    Launch launch;
    launch.scratch = &scratch;
    table->sum_squares(launch, device.data(), device.size(), dtype, static_cast<double*>(on.data()));
    on.fetch();
    expect_no_error();
    EXPECT_EQ(sum.get(0), want) << dtype_name(dtype);

    StepScale scale = {};
    ref_table().finish_norm({}, &want, nullptr, 2.0f, 1.0f, true, &scale);
    Buffer out(DType::kF64, 2);
    OnDevice result(driver, out);
    table->finish_norm({}, static_cast<double*>(on.data()), nullptr, 2.0f, 1.0f, true,
                       static_cast<StepScale*>(result.data()));
    result.fetch();
    EXPECT_EQ(std::memcmp(out.data(), &scale, sizeof scale), 0);
  }
}

}  // namespace
}  // namespace ds::kernels::test
