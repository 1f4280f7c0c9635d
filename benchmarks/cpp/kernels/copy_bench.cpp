// Conversions and accumulation, beside the memory bound of one load and one store (accumulation: one update) of fp32.
// A plain store makes the processor read the line first, so a rate above the bound is possible for memcpy, which does
// not.
#include "support.h"

namespace ds::kernels::bench {
namespace {

// Arguments: elements, threads, destination dtype, source dtype, accumulate (0 or 1).
void copy(benchmark::State& state) {
  const size_t n = state.range(0);
  const DType to = static_cast<DType>(state.range(2)), from = static_cast<DType>(state.range(3));
  const bool add = state.range(4) != 0;
  Memory src(n * dtype_bytes(from)), dst(n * dtype_bytes(to)), want(n * dtype_bytes(to)), a(n * 4), b(n * 4);
  src.fill(from, n);
  ThreadPool pool(static_cast<int>(state.range(1)));
  const auto kernel = [&](const KernelTable& t, ThreadPool* threads, void* target) {
    (add ? t.accumulate : t.copy)({threads}, target, to, src.as<>(), from, n, 0.5f);
  };
  kernel(ref_table(), nullptr, want.as<>());
  kernel(table(), &pool, dst.as<>());
  if (std::memcmp(want.as<>(), dst.as<>(), n * dtype_bytes(to)) != 0)
    return state.SkipWithError("differs from the reference");

  Stream stream = {a.as<float>()};
  (add ? stream.update[0] : stream.write) = b.as<float>();
  stream.numel = n;
  run(
      state, n * (dtype_bytes(from) + (add ? 2 : 1) * dtype_bytes(to)), [&] { kernel(table(), &pool, dst.as<>()); },
      n * (add ? 12 : 8), [&] { benchmark::DoNotOptimize(ds_cpu_stream({&pool}, &stream, 1)); });
}

constexpr int kF32 = static_cast<int>(DType::kF32), kBF16 = static_cast<int>(DType::kBF16),
              kF16 = static_cast<int>(DType::kF16);

BENCHMARK(copy)
    ->ArgNames({"n", "threads", "to", "from", "add"})
    ->ArgsProduct({{16 << 20}, {1, 2}, {kBF16, kF16}, {kF32}, {0}})
    ->ArgsProduct({{16 << 20}, {1, 2}, {kF32}, {kBF16, kF16, kF32}, {0, 1}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ds::kernels::bench
