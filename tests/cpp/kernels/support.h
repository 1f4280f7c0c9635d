// Parts that the kernel tests share: the tables to compare, buffers of any dtype at any alignment, numbers to put in.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "kernels/table.h"

namespace ds::kernels::test {

constexpr DType kDtypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF64};
constexpr DType kFloats[] = {DType::kF32, DType::kF16, DType::kBF16};
// Around the widths of registers, of the tail, of the pool's grain and of the norm's blocks.
constexpr size_t kSizes[] = {0, 1, 2, 15, 16, 17, 31, 33, 100, 1023, 16384, 16385, 70001};

inline const KernelTable& ref_table() { return *ds_cpu_kernels_isa(kKernelAbi, "ref"); }

// It is a device's table of this version, and none of its kernels is missing.
inline void expect_whole(const KernelTable& table, const char* device) {
  EXPECT_EQ(table.abi, kKernelAbi);
  EXPECT_EQ(table.size, sizeof(KernelTable));
  EXPECT_STREQ(table.device, device);
  void* entries[(sizeof(KernelTable) - offsetof(KernelTable, copy)) / sizeof(void*)];
  std::memcpy(entries, reinterpret_cast<const char*>(&table) + offsetof(KernelTable, copy), sizeof entries);
  for (void* entry : entries) EXPECT_NE(entry, nullptr);
}

// The table of every instruction set that this machine can run.
inline std::vector<const KernelTable*> isa_tables() {
  std::vector<const KernelTable*> all;
  for (const char* isa : {"scalar", "neon", "sse4", "avx2", "avx512"})
    if (const KernelTable* table = ds_cpu_kernels_isa(kKernelAbi, isa)) all.push_back(table);
  return all;
}

// Kernels of one room by the name of their instruction set; find(isa): those of one, or null.
template <typename Kernels>
struct Named {
  const char* isa;
  Kernels* kernels;
};
template <typename Find>
auto of_each_isa(const Find& find) {
  std::vector<Named<std::remove_pointer_t<decltype(find(""))>>> all;
  for (const char* isa : {"scalar", "neon", "sse4", "avx2", "avx512"})
    if (auto* kernels = find(isa)) all.push_back({isa, kernels});
  return all;
}

// n elements of `dtype`, `offset` elements behind a 64-byte boundary, with a canary behind them.
class Buffer {
 public:
  Buffer(DType dtype, size_t n, size_t offset = 0)
      : dtype_(dtype),
        n_(n),
        skip_(offset * dtype_bytes(dtype)),
        storage_(64 + skip_ + n * dtype_bytes(dtype) + 64, 0xA5) {
    skip_ += (64 - reinterpret_cast<uintptr_t>(storage_.data()) % 64) % 64;
  }
  Buffer(const Buffer& other) : Buffer(other.dtype_, other.n_, other.offset()) {
    std::memcpy(data(), other.data(), bytes());
  }

  void* data() { return storage_.data() + skip_; }
  const void* data() const { return storage_.data() + skip_; }
  DType dtype() const { return dtype_; }
  size_t size() const { return n_; }
  size_t bytes() const { return n_ * dtype_bytes(dtype_); }
  size_t offset() const { return reinterpret_cast<uintptr_t>(data()) % 64 / dtype_bytes(dtype_); }

  double get(size_t i) const {
    switch (dtype_) {
      case DType::kF32: return static_cast<const float*>(data())[i];
      case DType::kF16: return to_float(static_cast<const Fp16*>(data())[i]);
      case DType::kBF16: return to_float(static_cast<const Bf16*>(data())[i]);
      case DType::kF64: break;
    }
    return static_cast<const double*>(data())[i];
  }
  void set(size_t i, double x) {
    switch (dtype_) {
      case DType::kF32: static_cast<float*>(data())[i] = static_cast<float>(x); return;
      case DType::kF16: static_cast<Fp16*>(data())[i] = to_fp16(static_cast<float>(x)); return;
      case DType::kBF16: static_cast<Bf16*>(data())[i] = to_bf16(static_cast<float>(x)); return;
      case DType::kF64: static_cast<double*>(data())[i] = x; return;
    }
  }

  Buffer& randomize(unsigned seed, double scale = 1.0) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0, scale);
    for (size_t i = 0; i < n_; ++i) set(i, normal(random));
    return *this;
  }
  // Zeros, infinities, NaN, the largest, the smallest normal and subnormal of fp32 and of fp16, and their neighbours.
  Buffer& add_specials() {
    const double specials[] = {
        0.0,         -0.0,      INFINITY,  -INFINITY, NAN,       -NAN,       3.4028234663852886e38,
        65504,       65520,     -65519.9,  0x1p-126,  0x1p-127,  0x1p-149,   -0x1p-149,
        0x1p-14,     0x1p-15,   0x1p-24,   0x1p-25,   0x1.8p-25, 1.00390625, 1.01171875,
        -1.00390625, 0x1.002p0, 0x1.006p0, 0x1p-133,  0x1.8p-133};
    const size_t count = sizeof(specials) / sizeof(specials[0]);
    for (size_t i = 0; i < n_ && i < 3 * count; ++i) set(i, specials[i % count]);
    return *this;
  }
  std::vector<double> values() const {
    std::vector<double> all;
    for (size_t i = 0; i < n_; ++i) all.push_back(get(i));
    return all;
  }
  bool canary_intact() const {
    const size_t used = skip_ + bytes();
    for (size_t i = used; i < storage_.size(); ++i)
      if (storage_[i] != 0xA5) return false;
    return true;
  }

 private:
  DType dtype_;
  size_t n_, skip_;
  std::vector<unsigned char> storage_;
};

// Bytes, of which an odd last one is followed by one that stays as it is.
inline Buffer byte_buffer(size_t bytes, size_t offset = 0) { return Buffer(DType::kF16, (bytes + 1) / 2, offset); }
inline void fill_with(Buffer& bytes, unsigned seed) {
  std::mt19937 random(seed);
  for (size_t i = 0; i < bytes.bytes(); ++i) static_cast<uint8_t*>(bytes.data())[i] = static_cast<uint8_t>(random());
}

inline testing::AssertionResult equal_bytes(const Buffer& got, const Buffer& want) {
  if (!got.canary_intact()) return testing::AssertionFailure() << "written past the end";
  const auto *a = static_cast<const uint8_t*>(got.data()), *b = static_cast<const uint8_t*>(want.data());
  for (size_t i = 0; i < got.bytes(); ++i)
    if (a[i] != b[i]) return testing::AssertionFailure() << "byte " << i << ": " << int{a[i]} << ", not " << int{b[i]};
  return testing::AssertionSuccess();
}

// Moves of odd sizes between two buffers, with gaps between the targets. More of them than one launch takes.
class ManyMoves {
 public:
  ManyMoves(DType to, DType from) : source(from, place(), 1), target(to, ends_) {
    source.randomize(5).add_specials();
    target.randomize(6);
  }
  std::vector<Move> moves(void* into, const void* out_of) const {
    std::vector<Move> made;
    for (const One& one : all_)
      made.push_back({static_cast<char*>(into) + one.to * dtype_bytes(target.dtype()),
                      static_cast<const char*>(out_of) + one.from * dtype_bytes(source.dtype()), one.numel});
    return made;
  }

 private:
  struct One {
    size_t to, from, numel;
  };
  size_t place() {
    constexpr size_t kNumels[] = {1, 33, 0, 2, 100, 16, 1023, 17};
    size_t sources = 0;
    for (size_t i = 0; i < 400; ++i) {
      const size_t numel = i % 150 == 70 ? 70001 : kNumels[i % 8];
      all_.push_back({ends_, sources, numel});
      ends_ += numel + 1 + i % 3;
      sources += numel;
    }
    return sources;
  }
  std::vector<One> all_;
  size_t ends_ = 1;

 public:
  Buffer source, target;  // before the moves
};

// The same bits, any NaN being equal to any other; and nothing written behind the end.
inline testing::AssertionResult same(const Buffer& got, const Buffer& want) {
  if (!got.canary_intact()) return testing::AssertionFailure() << "written past the end";
  const size_t width = dtype_bytes(got.dtype());
  for (size_t i = 0; i < got.size(); ++i) {
    const bool nan = std::isnan(got.get(i)) && std::isnan(want.get(i));
    const char *a = static_cast<const char*>(got.data()), *b = static_cast<const char*>(want.data());
    if (!nan && std::memcmp(a + i * width, b + i * width, width) != 0)
      return testing::AssertionFailure() << "element " << i << " of " << got.size() << ": " << got.get(i) << ", not "
                                         << want.get(i);
  }
  return testing::AssertionSuccess();
}

// The distance from `want` in the 2-norm, by that of `want`.
inline double relative_error(const Buffer& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(got.get(i) - want[i], 2);
    norm += std::pow(want[i], 2);
  }
  return std::sqrt(error / norm);
}

// Distance in units of the last place of the larger of the two numbers that an update adds.
inline double ulps(double got, double want, double before) {
  const float scale = static_cast<float>(std::max(std::abs(want), std::abs(before)));
  return std::abs(got - want) / (std::nextafterf(scale, INFINITY) - static_cast<double>(scale));
}

inline std::string where(const KernelTable& table, DType a, DType b, size_t n, size_t offset) {
  return std::string(table.isa) + " " + dtype_name(a) + " " + dtype_name(b) + " n=" + std::to_string(n) +
         " offset=" + std::to_string(offset);
}

// Parameter, two moments, gradient of one fp32 tensor, and what a rule sums over it.
struct MomentTensor {
  Buffer master, exp_avg, exp_avg_sq, grad;
  double sums[2] = {0, 0};

  MomentTensor(size_t n, unsigned seed)
      : master(DType::kF32, n), exp_avg(DType::kF32, n), exp_avg_sq(DType::kF32, n), grad(DType::kF32, n) {
    master.randomize(seed);
    grad.randomize(seed + 3);
    for (size_t i = 0; i < n; ++i) {
      exp_avg.set(i, 0);
      exp_avg_sq.set(i, 0);
    }
  }
  // Random gradients with a direction, so that the parameters travel.
  std::vector<double> draw_gradients(unsigned seed) {
    grad.randomize(seed);
    for (size_t i = 0; i < grad.size(); ++i) grad.set(i, grad.get(i) + 0.3);
    return grad.values();
  }
  UpdateSegment segment(size_t begin, size_t end) {
    UpdateSegment s;
    s.master = static_cast<float*>(master.data()) + begin;
    s.states[0] = static_cast<float*>(exp_avg.data()) + begin;
    s.states[1] = static_cast<float*>(exp_avg_sq.data()) + begin;
    s.grad = static_cast<float*>(grad.data()) + begin;
    s.numel = end - begin;
    s.sums = sums;
    return s;
  }
  UpdateSegment segment() { return segment(0, master.size()); }
};

// Hyperparameters that AdamArgs and LambArgs have both, at update number `step`.
template <typename Args>
Args args_with_moments(double step, double eps) {
  Args args = {};
  args.lr = 1e-3;
  args.beta1 = 0.9;
  args.beta2 = 0.999;
  args.eps = eps;
  args.weight_decay = 0.01;
  args.bias_correction1 = 1 - std::pow(0.9, step);
  args.bias_correction2 = 1 - std::pow(0.999, step);
  return args;
}

// One pass of the update `name` over one segment.
template <typename Constants>
void run_pass(const KernelTable& table, const char* name, const UpdateSegment& segment, const Constants& constants,
              const StepScale* scale) {
  UpdateArgs update;
  update.constants = &constants;
  table.update({}, *table.find_update(name), &segment, 1, update, scale);
}

}  // namespace ds::kernels::test
