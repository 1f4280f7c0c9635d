// Parts that the kernel benchmarks share. Every benchmark checks its kernel against the reference before it times it,
// and reports bytes per second; the memory bound of the same pattern is timed in turns with it, within the same
// repetition, and `of_bound` is the ratio: 1.0 is as fast as the memory.
#pragma once
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <vector>

#include "base/half.h"
#include "kernels/stream.h"
#include "kernels/table.h"

namespace ds::kernels::bench {

inline const KernelTable& table() {
  const KernelTable* chosen = ds_cpu_kernels(kKernelAbi);
  if (chosen == nullptr) {
    std::fprintf(stderr, "%s\n", ds_cpu_kernels_error(kKernelAbi));
    std::exit(2);
  }
  return *chosen;
}
inline const KernelTable& ref_table() { return *ds_cpu_kernels_isa(kKernelAbi, "ref"); }

// Memory on huge pages where the system has them, touched once: page faults are not what is measured.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(std::max<size_t>(bytes, 64)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    madvise(data_, bytes_, MADV_HUGEPAGE);
    std::memset(data_, 0, bytes_);
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <typename T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }
  // Small fp32 numbers of both signs, converted.
  Memory& fill(DType dtype, size_t n, float scale = 1.0f) {
    for (size_t i = 0; i < n; ++i) {
      const float x = scale * (static_cast<float>(i % 1009) / 1009 - 0.5f);
      if (dtype == DType::kF32) as<float>()[i] = x;
      if (dtype == DType::kBF16) as<Bf16>()[i] = to_bf16(x);
      if (dtype == DType::kF16) as<Fp16>()[i] = to_fp16(x);
    }
    return *this;
  }

 private:
  size_t bytes_;
  void* data_;
};

inline double seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Times `kernel` and `bound` in turns; both move `bytes` (bound: `bound_bytes`). The ratio is of the medians.
inline void run(benchmark::State& state, size_t bytes, const std::function<void()>& kernel, size_t bound_bytes,
                const std::function<void()>& bound) {
  std::vector<double> kernel_times, bound_times;
  for (auto _ : state) {
    const double t = seconds(kernel);
    state.SetIterationTime(t);
    kernel_times.push_back(t);
    bound_times.push_back(seconds(bound));
  }
  const auto median = [](std::vector<double>& v) {
    std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
    return v[v.size() / 2];
  };
  state.SetBytesProcessed(static_cast<int64_t>(bytes) * state.iterations());
  const double bound_rate = bound_bytes / median(bound_times), rate = bytes / median(kernel_times);
  state.counters["bound_GBps"] = bound_rate / 1e9;
  state.counters["of_bound"] = rate / bound_rate;
}

// Hyperparameters that AdamArgs and LambArgs have both.
template <typename Args>
Args args_with_moments(double eps) {
  Args a = {};
  a.lr = 1e-3;
  a.beta1 = 0.9;
  a.beta2 = 0.999;
  a.eps = eps;
  a.weight_decay = 0.01;
  a.bias_correction1 = 0.5;
  a.bias_correction2 = 0.05;
  return a;
}

}  // namespace ds::kernels::bench
