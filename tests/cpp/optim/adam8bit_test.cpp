// Adam on 8-bit states: the code book, the rounding to it, and every instruction set against the plain loops.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "../kernels/device.h"
#include "kernels/adam.h"
#include "kernels/code_book.h"
#include "optim/rule.h"

namespace ds::optim {
namespace {

using namespace kernels;
using kernels::test::Buffer;
using kernels::test::isa_tables;
using kernels::test::ref_table;

TEST(CodeBookTest, IsWhatThePaperDescribes) {
  for (bool is_signed : {true, false}) {
    const CodeBook book = make_code_book(is_signed);
    int zeros = 0, negative = 0;
    for (int i = 0; i < 256; ++i) {
      zeros += book.values[i] == 0;
      negative += book.values[i] < 0;
      if (i > 0) {
        EXPECT_LT(book.values[i - 1], book.values[i]);
      }
    }
    EXPECT_EQ(zeros, 1);
    EXPECT_EQ(negative, is_signed ? 127 : 0);
    EXPECT_EQ(book.values[255], 1.0f);
    EXPECT_NEAR(book.values[254], is_signed ? 0.9930f : 0.9965f, 1e-4);  // the middle of the last 64th (128th) of 0.9
    EXPECT_NEAR(book.values[is_signed ? 128 : 1], is_signed ? 5.5e-7f : 3.25e-7f, 1e-12);
  }
}

// Against the search that the arithmetic stands for: the nearest number, where two are not equally near.
TEST(CodeBookTest, CodesAreThoseOfTheNearestNumbers) {
  for (bool is_signed : {true, false}) {
    const CodeBook book = make_code_book(is_signed);
    for (int i = 0; i < 256; ++i) EXPECT_EQ(code_of(book, book.values[i]), i);
    std::vector<float> asked = {0.0f, 1e-45f, 1e-30f};
    std::mt19937 random(7);
    for (int i = 0; i < 200000; ++i)
      asked.push_back(std::exp(std::uniform_real_distribution<float>(std::log(1e-8f), 0.0f)(random)));
    for (int i = 1; i < 256; ++i) {  // on both sides of a tie
      const float middle = (book.values[i - 1] + book.values[i]) / 2;
      if (middle >= 0) asked.insert(asked.end(), {middle * (1 - 1e-6f), middle * (1 + 1e-6f)});
    }
    int last_code = 0;
    std::sort(asked.begin(), asked.end());
    for (float size : asked) {
      for (float y : {size, -size}) {
        if (y < 0 && !is_signed) continue;
        const int code = code_of(book, y);
        const auto off = [&](int c) { return std::abs(double{book.values[c]} - y); };
        const double slack = 3e-6 * size;
        const int lowest = is_signed || y == 0 ? 0 : 1;  // what is not 0 does not become 0 in the unsigned book
        EXPECT_GE(code, lowest) << y;
        if (code > lowest) {
          EXPECT_LE(off(code), off(code - 1) + slack) << y;
        }
        if (code < 255) {
          EXPECT_LE(off(code), off(code + 1) + slack) << y;
        }
        if (y >= 0) {
          EXPECT_GE(code, last_code) << y;
          last_code = code;
        }
      }
    }
    EXPECT_EQ(code_of(book, 1.0f), 255);
    if (is_signed) {
      EXPECT_EQ(code_of(book, -1.0f), 0);
    }
  }
}

struct Tensor {
  Buffer master, grad, lp;
  std::vector<unsigned char> codes[2];
  std::vector<float> maxima[2];

  Tensor(size_t n, DType dtype, DType grad_dtype, unsigned seed)
      : master(dtype, n, 1), grad(grad_dtype, n, 1), lp(DType::kBF16, n) {
    master.randomize(seed);
    grad.randomize(seed + 1);
    lp.randomize(seed + 2);
    for (int k = 0; k < 2; ++k) {
      codes[k].assign(n, 0);
      maxima[k].assign(code_blocks(n), 0.0f);
    }
  }
  UpdateSegment segment() {
    UpdateSegment s;
    s.master = master.data();
    s.grad = grad.data();
    s.lp = lp.data();
    for (int k = 0; k < 2; ++k) {
      s.states[k] = codes[k].data();
      s.states[2 + k] = maxima[k].data();
    }
    s.numel = master.size();
    return s;
  }
};

void step(const KernelTable& table, const Launch& launch, const std::vector<UpdateSegment>& segments, DType dtype,
          DType grad, double number) {
  UpdateArgs args;
  args.master_dtype = dtype;
  args.grad_dtype = grad;
  args.lp_dtype = DType::kBF16;
  const StepScale scale = {0, 0.7f, 0};
  run_pass(table, launch, find_rule("adam8bit"), find_rule("adam8bit").passes[0], segments, args, {1e-2, 0.9, 0.99, 1e-8, 0.01, 1, 1}, number,
           &scale);
}

void expect_same(const Tensor& got, const Tensor& want, const std::string& where) {
  EXPECT_TRUE(test::same(got.master, want.master)) << where;
  EXPECT_TRUE(test::same(got.lp, want.lp)) << where;
  for (int k = 0; k < 2; ++k) {
    EXPECT_EQ(got.codes[k], want.codes[k]) << where << " codes " << k;
    for (size_t i = 0; i < got.maxima[k].size(); ++i) {
      const float a = got.maxima[k][i], b = want.maxima[k][i];
      EXPECT_TRUE(a == b || (std::isnan(a) && std::isnan(b))) << where << " maximum " << k << " of block " << i;
    }
  }
}

TEST(Adam8bitTest, EveryIsaEqualsTheReference) {
  ThreadPool pool(3);
  for (const KernelTable* table : isa_tables()) {
    for (DType dtype : test::kFloats) {
      for (size_t n : {0, 1, 7, 255, 256, 257, 4096, 70001}) {
        Tensor want(n, dtype, DType::kF32, 5), got = want;
        for (int number = 1; number <= 4; ++number) {
          want.grad.randomize(100 + number, number == 2 ? 1e-20 : 1.0);
          std::memcpy(got.grad.data(), want.grad.data(), want.grad.bytes());
          step(ref_table(), {}, {want.segment()}, dtype, DType::kF32, number);
          step(*table, {&pool}, {got.segment()}, dtype, DType::kF32, number);
          expect_same(got, want, std::string(table->isa) + " n=" + std::to_string(n) + " " + dtype_name(dtype));
        }
      }
    }
  }
}

TEST(Adam8bitTest, SpecialGradientsStayInTheirBlock) {
  for (const KernelTable* table : isa_tables()) {
    Tensor want(3 * kCodeBlock, DType::kF32, DType::kF32, 9);
    want.grad.add_specials();
    Tensor got = want;
    for (int number = 1; number <= 2; ++number) {
      step(ref_table(), {}, {want.segment()}, DType::kF32, DType::kF32, number);
      step(*table, {}, {got.segment()}, DType::kF32, DType::kF32, number);
      expect_same(got, want, table->isa);
    }
    for (size_t i = kCodeBlock; i < 3 * kCodeBlock; ++i) ASSERT_TRUE(std::isfinite(got.master.get(i)));
    EXPECT_TRUE(std::isnan(got.master.get(100)));
  }
}

TEST(Adam8bitTest, ManyTensorsEqualOneByOne) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    std::vector<Tensor> want;
    for (size_t n : {5, 0, 8192, 20001, 256, 9000}) want.emplace_back(n, DType::kF32, DType::kF16, unsigned(n));
    std::vector<Tensor> got(want.begin(), want.end());
    std::vector<UpdateSegment> segments;
    for (Tensor& t : got) segments.push_back(t.segment());
    for (Tensor& t : want) step(ref_table(), {}, {t.segment()}, DType::kF32, DType::kF16, 1);
    step(*ds_cpu_kernels(kKernelAbi), {&pool}, segments, DType::kF32, DType::kF16, 1);
    for (size_t i = 0; i < want.size(); ++i) expect_same(got[i], want[i], "tensor " + std::to_string(i));
  }
}

TEST(Adam8bitTest, TheFirstStepIsThatOfAdamAndStatesAreClose) {
  const size_t n = 10000;
  Tensor t(n, DType::kF32, DType::kF32, 3);
  const Tensor before = t;
  step(*ds_cpu_kernels(kKernelAbi), {}, {t.segment()}, DType::kF32, DType::kF32, 1);
  const CodeBook books[] = {make_code_book(true), make_code_book(false)};
  for (size_t i = 0; i < n; ++i) {
    const double g = 0.7f * before.grad.get(i), p = before.master.get(i),
                 d = 1e-2 * (g / (std::abs(g) + 1e-8) + 0.01 * p);
    ASSERT_NEAR(t.master.get(i), p - d, 1e-6);
    const double exact[] = {0.1 * g, 0.01 * g * g};
    for (int k = 0; k < 2; ++k) {
      const double max = t.maxima[k][i / kCodeBlock], found = books[k].values[t.codes[k][i]] * max;
      // Half a step of the widest decade, relative to the value, or of the narrowest.
      ASSERT_NEAR(found, exact[k], std::max(std::abs(exact[k]) * 0.8, 1e-6 * max)) << i;
      if (std::abs(exact[k]) > 0.1 * max) {
        ASSERT_NEAR(found, exact[k], 0.0075 * max) << i;
      }
    }
  }
}

using CudaAdam8bitTest = test::CudaTest;
TEST_F(CudaAdam8bitTest, TheBitsAreThoseOfTheReference) {
  std::vector<size_t> lengths = sizes();
  lengths.insert(lengths.end(), {255, 256, 257});
  for (size_t n : lengths) {
    Tensor want(n, DType::kF32, DType::kF32, 5), got = want;
    const auto put = [&](const void* data, size_t bytes) {
      const uintptr_t address = driver.allocate(bytes);
      driver.to_device(address, data, bytes);
      return address;
    };
    UpdateSegment host = got.segment(), device = host;
    const size_t maxima = code_blocks(n) * 4;
    const uintptr_t at[7] = {put(host.master, n * 4),    put(host.grad, n * 4),  put(host.lp, n * 2),
                             put(host.states[0], n),     put(host.states[1], n), put(host.states[2], maxima),
                             put(host.states[3], maxima)};
    device.master = reinterpret_cast<void*>(at[0]);
    device.grad = reinterpret_cast<void*>(at[1]);
    device.lp = reinterpret_cast<void*>(at[2]);
    for (int k = 0; k < 4; ++k) device.states[k] = reinterpret_cast<void*>(at[3 + k]);
    UpdateArgs args;
    args.lp_dtype = DType::kBF16;
    for (int number = 1; number <= 3; ++number) {
      const std::vector<double> hyper = {1e-2, 0.9, 0.99, 1e-8, 0.01, 1, 1};
      run_pass(ref_table(), {}, find_rule("adam8bit"), find_rule("adam8bit").passes[0], {want.segment()}, args, hyper, number, nullptr);
      run_pass(*table, {}, find_rule("adam8bit"), find_rule("adam8bit").passes[0], {device}, args, hyper, number, nullptr);
    }
    driver.to_host(host.master, at[0], n * 4);
    driver.to_host(host.lp, at[2], n * 2);
    for (int k = 0; k < 2; ++k) {
      driver.to_host(host.states[k], at[3 + k], n);
      driver.to_host(host.states[2 + k], at[5 + k], maxima);
    }
    for (uintptr_t address : at) driver.release(address);
    expect_no_error();
    expect_same(got, want, "cuda n=" + std::to_string(n));
  }
}

}  // namespace
}  // namespace ds::optim
