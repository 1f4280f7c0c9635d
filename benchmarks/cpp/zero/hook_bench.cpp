// The cost of the engine's gradient hooks for each parameter of a model of 1,000 tiny ones, without any Python: a
// backward with no hooks, with hooks that do nothing, and with the engine's, which move the gradient into its slot,
// count and free it. The gradients of the first two are freed after the backward, which is timed with it, since the
// engine's have been freed inside. Interleaved; medians of the differences, in ns for each parameter.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>

#include "zero/gradients/accumulator_hooks.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

constexpr int kParams = 1000, kRounds = 200;

std::vector<at::Tensor> parameters() {
  std::vector<at::Tensor> made;
  for (int i = 0; i < kParams; ++i) made.push_back(at::ones({8}).set_requires_grad(true));
  return made;
}

at::Tensor loss_of(const std::vector<at::Tensor>& params, const at::Tensor& x) {
  std::vector<at::Tensor> products;
  for (const at::Tensor& param : params) products.push_back(x * param);
  return at::stack(products).sum();
}

std::shared_ptr<Engine> engine_of(const std::vector<at::Tensor>& params, int stage) {
  std::vector<ParamSpec> specs;
  for (int i = 0; i < kParams; ++i) specs.push_back({params[i], "p" + std::to_string(i), 0, i});
  EngineOptions options;
  options.policy = stage_policy(stage);
  const auto spaces = std::make_shared<MeshSpaces>(comm::ProcessMesh::alone(), options.policy, specs);
  return std::make_shared<Engine>(std::move(specs), std::vector<ShardedParamPtr>{}, options, spaces);
}

double ns_each(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / kParams;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void hooks(benchmark::State& state) {
  const at::Tensor x = at::ones({8});
  const auto plain = parameters(), again = parameters(), hooked = parameters(), used = parameters();
  AccumulatorHooks nothing;
  int64_t fired = 0;
  for (const at::Tensor& param : hooked)
    nothing.add(
        param, [](const at::Tensor& grad) { return grad; }, [&fired] { ++fired; });
  const auto engine = engine_of(used, static_cast<int>(state.range(0)));
  engine->backward().register_hooks();

  const auto bare = [&](const std::vector<at::Tensor>& params) {
    const at::Tensor loss = loss_of(params, x);
    return ns_each([&] {
      loss.backward();
      for (const at::Tensor& param : params) param.mutable_grad() = at::Tensor();
    });
  };
  const auto through_engine = [&](bool whole) {
    const at::Tensor loss = loss_of(used, x);
    if (!whole) engine->backward().begin(true);
    const double found = ns_each([&] {
      if (whole) engine->backward().begin(true);
      loss.backward();
      if (whole) engine->backward().end();
    });
    if (!whole) engine->backward().end();
    engine->backward().clear_grads();
    return found;
  };

  // Each starts a round as often as the others: whoever comes after the engine finds another state of the allocator.
  const std::vector<std::function<double()>> kinds = {
      [&] { return bare(plain); }, [&] { return bare(again); }, [&] { return bare(hooked); },
      [&] { return through_engine(false); }, [&] { return through_engine(true); }};
  std::vector<double> without, noise, empty, ours, all;
  for (auto _ : state) {
    for (int round = -5; round < kRounds; ++round) {
      std::vector<double> took(kinds.size());
      for (size_t k = 0; k < kinds.size(); ++k) {
        const size_t kind = (k + static_cast<size_t>(round + 5)) % kinds.size();
        took[kind] = kinds[kind]();
      }
      if (round < 0) continue;
      without.push_back(took[0]);
      noise.push_back(took[1] - took[0]);
      empty.push_back(took[2] - took[0]);
      ours.push_back(took[3] - took[0]);
      all.push_back(took[4] - took[0]);
    }
  }
  if (fired != (kRounds + 5) * kParams || engine->grads().grad_uses().learned() != std::vector<int32_t>(used.size(), 1))
    state.SkipWithError("hooks were not called");
  state.counters["backward_ns"] = median(without);
  state.counters["noise_ns"] = median(noise);
  state.counters["empty_hook_ns"] = median(empty);
  state.counters["engine_hook_ns"] = median(ours);
  state.counters["engine_with_begin_and_end_ns"] = median(all);
  engine->release();
}
BENCHMARK(hooks)->Name("hooks/stage")->Arg(0)->Arg(2)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ds::zero
