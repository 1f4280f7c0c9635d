// The sum of squares, beside the rate of reading the same number of bytes.
#include "support.h"

namespace ds::kernels::bench {
namespace {

// Arguments: elements, threads, dtype.
void sum_squares(benchmark::State& state) {
  const size_t n = state.range(0);
  const DType dtype = static_cast<DType>(state.range(2));
  Memory data(n * dtype_bytes(dtype));
  data.fill(dtype, n);
  const Segment segment = {data.as<>(), n};
  ThreadPool pool(static_cast<int>(state.range(1)));
  double want = 0, got = 0;
  ref_table().sum_squares({}, &segment, 1, dtype, &want);
  table().sum_squares({&pool}, &segment, 1, dtype, &got);
  if (want != got) return state.SkipWithError("differs from the reference");

  Stream stream = {data.as<float>()};
  stream.numel = n * dtype_bytes(dtype) / 4;
  run(
      state, n * dtype_bytes(dtype), [&] { table().sum_squares({&pool}, &segment, 1, dtype, &got); },
      n * dtype_bytes(dtype), [&] { benchmark::DoNotOptimize(ds_cpu_stream({&pool}, &stream, 1)); });
}

BENCHMARK(sum_squares)
    ->ArgNames({"n", "threads", "dtype"})
    ->ArgsProduct({{16 << 20}, {1, 2}, {static_cast<int>(DType::kF32), static_cast<int>(DType::kBF16)}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ds::kernels::bench
