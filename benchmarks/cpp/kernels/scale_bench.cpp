// data *= factor. THE EXEMPLAR of a kernel's benchmark: verify, then time in turns with the memory bound of the same
// pattern (here one load and one store).
#include "support.h"

namespace ds::kernels::bench {
namespace {

// Arguments: elements, threads.
void scale(benchmark::State& state) {
  const size_t n = state.range(0);
  Memory data(n * 4), want(n * 4), read(n * 4);
  data.fill(DType::kF32, n);
  want.fill(DType::kF32, n);
  ThreadPool pool(static_cast<int>(state.range(1)));

  ref_table().scale({}, want.as<>(), DType::kF32, n, 0.5f);
  table().scale({&pool}, data.as<>(), DType::kF32, n, 0.5f);
  if (std::memcmp(want.as<>(), data.as<>(), n * 4) != 0) return state.SkipWithError("differs from the reference");

  // Reading and updating the same array is one stream.
  const Stream stream = {data.as<float>(), {data.as<float>()}, nullptr, n};
  run(
      state, n * 8, [&] { table().scale({&pool}, data.as<>(), DType::kF32, n, 1.0001f); }, n * 8,
      [&] { benchmark::DoNotOptimize(ds_cpu_stream({&pool}, &stream, 1)); });
}

BENCHMARK(scale)
    ->ArgNames({"n", "threads"})
    ->ArgsProduct({{1 << 14, 16 << 20}, {1, 2}})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace ds::kernels::bench
