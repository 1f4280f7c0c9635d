// LAMB and Muon's element-wise halves on one large tensor and on 1,024 small ones, beside the memory bound of the same
// loads and stores. LAMB reads weights and states twice: 7 loads and 3 stores of 4 bytes per element.
#include "kernels/lamb.h"

#include "kernels/muon.h"
#include "support.h"

namespace ds::kernels::bench {
namespace {

LambConstants lamb_block() {
  auto a = args_with_moments<LambArgs>(1e-6);
  a.min_ratio = 0.01;
  a.max_ratio = 10;
  return lamb_constants(a);
}

void passes(const KernelTable& table, ThreadPool* pool, std::initializer_list<const char*> names,
            const UpdateSegment* segments, size_t count, const void* constants) {
  UpdateArgs args;
  args.constants = constants;
  for (const char* name : names) table.update({pool}, *table.find_update(name), segments, count, args, nullptr);
}

// `arrays`: weights, then states, gradient, scratch; null ones are left out.
std::vector<UpdateSegment> cut(float* p, float* m, float* v, const float* g, float* scratch, double* sums, size_t n,
                               size_t count) {
  std::vector<UpdateSegment> segments(count);
  for (size_t s = 0; s < count; ++s) {
    const size_t i = s * (n / count);
    segments[s].master = p + i;
    segments[s].states[0] = m + i;
    if (v != nullptr) segments[s].states[1] = v + i;
    segments[s].grad = g + i;
    if (scratch != nullptr) segments[s].scratch = scratch + i;
    if (sums != nullptr) segments[s].sums = sums + s * kLambSums;
    segments[s].numel = n / count;
  }
  return segments;
}

// Arguments: elements, segments, threads.
void lamb(benchmark::State& state) {
  const size_t n = state.range(0), count = state.range(1), each = n / count;
  Memory p(n * 4), m(n * 4), v(n * 4), g(n * 4);
  p.fill(DType::kF32, n);
  g.fill(DType::kF32, n, 1e-3f);
  std::vector<double> sums(count * kLambSums);
  const auto segments = cut(p.as<float>(), m.as<float>(), v.as<float>(), g.as<float>(), nullptr, sums.data(), n, count);
  ThreadPool pool(static_cast<int>(state.range(2)));
  const LambConstants block = lamb_block();
  const auto step = [&](const KernelTable& table, ThreadPool* threads, const UpdateSegment* some, size_t number) {
    std::fill(sums.begin(), sums.end(), 0.0);
    passes(table, threads, {"lamb_moments", "lamb"}, some, number, &block);
  };
  std::vector<float> rp(p.as<float>(), p.as<float>() + each), rm(each), rv(each);
  const auto reference = cut(rp.data(), rm.data(), rv.data(), g.as<float>(), nullptr, sums.data(), each, 1);
  step(ref_table(), nullptr, reference.data(), 1);
  step(table(), &pool, segments.data(), count);
  if (std::memcmp(rp.data(), p.as<>(), each * 4) != 0) return state.SkipWithError("differs from the reference");

  const Stream first = {p.as<float>(), {m.as<float>(), v.as<float>(), nullptr}, nullptr, n};
  const Stream second = {m.as<float>(), {p.as<float>(), nullptr, nullptr}, nullptr, n};
  const Stream more = {v.as<float>(), {nullptr, nullptr, nullptr}, nullptr, n};
  run(
      state, n * 40, [&] { step(table(), &pool, segments.data(), count); }, n * 40,
      [&] {
        for (const Stream* stream : {&first, &more, &second, &more})
          benchmark::DoNotOptimize(ds_cpu_stream({&pool}, stream, 1));
      });
}

// The pass before the orthogonalisation (2 loads, 2 stores) and the one after it (2 loads, 1 store).
void muon(benchmark::State& state) {
  const size_t n = state.range(0), count = state.range(1), each = n / count;
  Memory p(n * 4), m(n * 4), g(n * 4), scratch(n * 4);
  p.fill(DType::kF32, n);
  g.fill(DType::kF32, n, 1e-3f);
  const auto segments =
      cut(p.as<float>(), m.as<float>(), nullptr, g.as<float>(), scratch.as<float>(), nullptr, n, count);
  ThreadPool pool(static_cast<int>(state.range(2)));
  const MuonConstants block = muon_constants({0.02, 0.95, 0.01, true});
  std::vector<float> rp(p.as<float>(), p.as<float>() + each), rm(each), rs(each);
  const auto reference = cut(rp.data(), rm.data(), nullptr, g.as<float>(), rs.data(), nullptr, each, 1);
  passes(ref_table(), nullptr, {"muon_momentum", "muon"}, reference.data(), 1, &block);
  passes(table(), &pool, {"muon_momentum", "muon"}, segments.data(), count, &block);
  if (std::memcmp(rp.data(), p.as<>(), each * 4) != 0) return state.SkipWithError("differs from the reference");

  const Stream first = {g.as<float>(), {m.as<float>(), nullptr, nullptr}, scratch.as<float>(), n};
  const Stream second = {scratch.as<float>(), {p.as<float>(), nullptr, nullptr}, nullptr, n};
  run(
      state, n * 28,
      [&] {
        passes(table(), &pool, {"muon_momentum", "muon"}, segments.data(), count, &block);
      },
      n * 28,
      [&] {
        for (const Stream* stream : {&first, &second}) benchmark::DoNotOptimize(ds_cpu_stream({&pool}, stream, 1));
      });
}

BENCHMARK(lamb)
    ->ArgNames({"n", "segments", "threads"})
    ->ArgsProduct({{64 << 20}, {1, 1024}, {1, 2}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(muon)
    ->ArgNames({"n", "segments", "threads"})
    ->ArgsProduct({{64 << 20}, {1, 1024}, {1, 2}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ds::kernels::bench
