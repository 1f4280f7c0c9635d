// Every registered rule on one large tensor and on 1,024 small ones, each allocated by itself, beside the memory bound
// with the same loads and stores on the same tensors. A new rule is timed here without a line of its own.
#include "../kernels/support.h"

#include "optim/rule.h"

namespace ds::optim {
namespace {

using kernels::Stream;
using kernels::UpdateArgs;
using kernels::UpdateSegment;
using kernels::bench::Memory;

struct Tensor {
  Memory master, grad, scratch;
  std::vector<std::unique_ptr<Memory>> states;
  std::vector<double> sums;

  Tensor(const Rule& rule, size_t n)
      : master(n * 4), grad(n * 4), scratch(rule.scratch ? n * 4 : 0), sums(static_cast<size_t>(rule.sums)) {
    master.fill(DType::kF32, n);
    grad.fill(DType::kF32, n, 1e-3f);
    for (size_t k = 0; k < rule.slots.size(); ++k) states.push_back(std::make_unique<Memory>(n * 4));
  }
};

void update(benchmark::State& state, const Rule* rule) {
  const size_t n = state.range(0), count = state.range(1), each = n / count;
  std::vector<std::unique_ptr<Tensor>> tensors;
  std::vector<UpdateSegment> segments(count);
  std::vector<Stream> streams(count);
  for (size_t i = 0; i < count; ++i) {
    tensors.push_back(std::make_unique<Tensor>(*rule, each));
    Tensor& t = *tensors.back();
    segments[i].master = streams[i].update[0] = t.master.as<float>();
    segments[i].grad = streams[i].read = t.grad.as<float>();
    segments[i].scratch = t.scratch.as<float>();
    segments[i].sums = t.sums.data();
    segments[i].numel = streams[i].numel = each;
    for (size_t k = 0; k < t.states.size(); ++k) segments[i].states[k] = t.states[k]->as<>();
    for (size_t k = 0; k < t.states.size() && k < 2; ++k) streams[i].update[1 + k] = t.states[k]->as<float>();
  }
  std::vector<double> hyper;
  for (const Hyperparameter& one : rule->hyper) hyper.push_back(one.name == "momentum" ? 0.9 : one.fallback);
  ThreadPool pool(static_cast<int>(state.range(2)));
  const auto step = [&] {
    for (const Pass& pass : rule->passes)
      run_pass(kernels::bench::table(), {&pool}, *rule, pass, segments, UpdateArgs(), hyper, 3, nullptr);
  };
  const size_t bytes = n * 4 * (3 + 2 * rule->slots.size());
  kernels::bench::run(state, bytes, step, bytes,
                      [&] { benchmark::DoNotOptimize(ds_cpu_stream({&pool}, streams.data(), count)); });
}

}  // namespace
}  // namespace ds::optim

// The rules are known when main() begins, not while static objects are made.
int main(int argc, char** argv) {
  for (const ds::optim::Rule& rule : ds::optim::rules())
    if (!rule.packed)
      benchmark::RegisterBenchmark(rule.name.c_str(), &ds::optim::update, &rule)
          ->ArgNames({"n", "segments", "threads"})
          ->ArgsProduct({{64 << 20}, {1, 1024}, {1, 2}})
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
