// Adam on one large tensor and on 1,024 small ones, beside the memory bound of 4 loads and 3 stores in place.
#include "kernels/adam.h"

#include "support.h"

namespace ds::kernels::bench {
namespace {

AdamConstants constants() {
  auto a = args_with_moments<AdamArgs>(1e-8);
  a.adamw = true;
  return adam_constants(a);
}

UpdateSegment segment(float* p, float* m, float* v, const void* grad, void* lp, size_t numel) {
  UpdateSegment s;
  s.master = p;
  s.states[0] = m;
  s.states[1] = v;
  s.grad = grad;
  s.lp = lp;
  s.numel = numel;
  return s;
}

void update(const KernelTable& table, ThreadPool* pool, const UpdateSegment* segments, size_t count, DType grad) {
  const AdamConstants block = constants();
  UpdateArgs args;
  args.grad_dtype = grad;
  args.lp_dtype = DType::kBF16;
  args.constants = &block;
  table.update({pool}, *table.find_update("adam"), segments, count, args, nullptr);
}

// Arguments: elements, segments, threads, 16-bit gradients and copy (0 or 1).
void adam(benchmark::State& state) {
  const size_t n = state.range(0), count = state.range(1), each = n / count;
  const bool half = state.range(3) != 0;
  const DType grad = half ? DType::kBF16 : DType::kF32;
  Memory p(n * 4), m(n * 4), v(n * 4), g(n * dtype_bytes(grad)), lp(half ? n * 2 : 0), other_g(half ? n * 4 : 0);
  p.fill(DType::kF32, n);
  g.fill(grad, n, 1e-3f);
  std::vector<UpdateSegment> segments;
  for (size_t s = 0; s < count; ++s) {
    const size_t i = s * each;
    segments.push_back(segment(p.as<float>() + i, m.as<float>() + i, v.as<float>() + i,
                               g.as<char>() + i * dtype_bytes(grad), half ? lp.as<Bf16>() + i : nullptr, each));
  }
  ThreadPool pool(static_cast<int>(state.range(2)));

  const size_t check = std::min<size_t>(each, 10007);
  std::vector<float> rp(check), rm(check), rv(check);
  std::memcpy(rp.data(), p.as<>(), check * 4);
  const UpdateSegment reference = segment(rp.data(), rm.data(), rv.data(), g.as<>(), nullptr, check);
  update(ref_table(), nullptr, &reference, 1, grad);
  update(table(), &pool, segments.data(), count, grad);
  if (std::memcmp(rp.data(), p.as<>(), check * 4) != 0) return state.SkipWithError("differs from the reference");

  const Stream stream = {
      half ? other_g.as<float>() : g.as<float>(), {p.as<float>(), m.as<float>(), v.as<float>()}, nullptr, n};
  run(
      state, n * 28, [&] { update(table(), &pool, segments.data(), count, grad); }, n * 28,
      [&] { benchmark::DoNotOptimize(ds_cpu_stream({&pool}, &stream, 1)); });
}

BENCHMARK(adam)
    ->ArgNames({"n", "segments", "threads", "bf16"})
    ->ArgsProduct({{64 << 20}, {1, 1024}, {1, 2}, {0, 1}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ds::kernels::bench
