// Sums of magnitudes down columns: verify, then time in turns with reading the same memory.
#include "support.h"

namespace ds::kernels::bench {
namespace {

// Arguments: elements, columns, threads.
void column_sums(benchmark::State& state) {
  const size_t n = state.range(0), columns = state.range(1);
  Memory data(n * 4), sums(columns * 8), want(columns * 8);
  data.fill(DType::kF32, n);
  std::memset(sums.as<>(), 0, columns * 8);
  std::memset(want.as<>(), 0, columns * 8);
  ThreadPool pool(static_cast<int>(state.range(2)));
  ref_table().column_sums({}, data.as<>(), DType::kF32, n, 0, columns, want.as<double>());
  table().column_sums({&pool}, data.as<>(), DType::kF32, n, 0, columns, sums.as<double>());
  if (std::memcmp(want.as<>(), sums.as<>(), columns * 8) != 0) return state.SkipWithError("differs from the reference");
  const Stream stream = {data.as<float>(), {data.as<float>()}, nullptr, n};
  run(
      state, n * 4, [&] { table().column_sums({&pool}, data.as<>(), DType::kF32, n, 0, columns, sums.as<double>()); },
      n * 8, [&] { benchmark::DoNotOptimize(ds_cpu_stream({&pool}, &stream, 1)); });
}

BENCHMARK(column_sums)
    ->ArgNames({"n", "columns", "threads"})
    ->ArgsProduct({{16 << 20}, {1024, 16384}, {1, 2}})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace ds::kernels::bench
