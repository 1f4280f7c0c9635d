// The kernels made of torch's operations (csrc/zero/any_kernels.cpp) on CPU tensors: the norm of a step, unscaling,
// clipping, AdamW and the 16-bit copy, against the same step in torch's foreach operations. Both take turns; asked for
// is a ratio of at most 1.1. Arguments: thousands of elements of a tensor, number of tensors.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <vector>

#include "optim/rule.h"
#include "zero/any_kernels.h"

namespace ds::zero {
namespace {

constexpr double kRate = 1e-3, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kDecay = 0.01, kLossScale = 1024, kClip = 1;
using Tensors = std::vector<at::Tensor>;

struct Step {
  Tensors masters, grads, firsts, seconds, lows;
  double number = 0;

  Step(int64_t numel, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      masters.push_back(at::randn({numel}));
      grads.push_back(at::randn({numel}).mul_(kLossScale));
      firsts.push_back(at::zeros({numel}));
      seconds.push_back(at::zeros({numel}));
      lows.push_back(at::zeros({numel}, at::kBFloat16));
    }
  }

  void by_foreach() {
    number += 1;
    at::_foreach_mul_(grads, 1 / kLossScale);
    const double norm = at::stack(at::_foreach_norm(grads, 2)).norm().item<double>();
    at::_foreach_mul_(grads, std::min(1.0, kClip / (norm + 1e-6)));
    at::_foreach_mul_(masters, 1 - kRate * kDecay);
    at::_foreach_mul_(firsts, kBeta1);
    at::_foreach_add_(firsts, grads, 1 - kBeta1);
    at::_foreach_mul_(seconds, kBeta2);
    at::_foreach_addcmul_(seconds, grads, grads, 1 - kBeta2);
    auto roots = at::_foreach_sqrt(seconds);
    at::_foreach_div_(roots, std::sqrt(1 - std::pow(kBeta2, number)));
    at::_foreach_add_(roots, kEps);
    at::_foreach_addcdiv_(masters, firsts, roots, -kRate / (1 - std::pow(kBeta1, number)));
    for (size_t i = 0; i < lows.size(); ++i) lows[i].copy_(masters[i]);
  }

  void by_kernels(const kernels::KernelTable& table, ThreadPool& pool) {
    number += 1;
    std::vector<kernels::Segment> segments;
    std::vector<kernels::UpdateSegment> updates;
    for (size_t i = 0; i < masters.size(); ++i) {
      const auto numel = static_cast<size_t>(masters[i].numel());
      segments.push_back({grads[i].data_ptr(), numel});
      kernels::UpdateSegment update;
      update.master = masters[i].data_ptr();
      update.states[0] = firsts[i].data_ptr();
      update.states[1] = seconds[i].data_ptr();
      update.grad = grads[i].data_ptr();
      update.lp = lows[i].data_ptr();
      update.numel = numel;
      updates.push_back(update);
    }
    const kernels::Launch launch = {&pool, nullptr, nullptr};
    double sum = 0;
    kernels::StepScale scale = {};
    table.sum_squares(launch, segments.data(), segments.size(), DType::kF32, &sum);
    table.finish_norm(launch, &sum, nullptr, kLossScale, kClip, true, &scale);
    kernels::UpdateArgs args;
    args.lp_dtype = DType::kBF16;
    const optim::Rule& adam = optim::find_rule("adam");
    optim::run_pass(table, launch, adam, adam.passes[0], updates, args, {kRate, kBeta1, kBeta2, kEps, kDecay, 1, 1},
                    number, &scale);
  }
};

double ms_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void BM_step(benchmark::State& state) {
  const int64_t numel = state.range(0) * 1000, count = state.range(1);
  ThreadPool pool(at::get_num_threads());
  Step theirs(numel, count), ours(numel, count);
  std::vector<double> foreach, kernels;
  for (auto _ : state) {
    foreach
      .push_back(ms_of([&] { theirs.by_foreach(); }));
    kernels.push_back(ms_of([&] { ours.by_kernels(any_kernels(at::kCPU), pool); }));
    for (size_t i = 0; i < theirs.grads.size(); ++i) theirs.grads[i].copy_(ours.grads[i]);
  }
  state.counters["foreach_ms"] = median(foreach);
  state.counters["kernels_ms"] = median(kernels);
  state.counters["ratio"] = median(kernels) / median(foreach);
  state.counters["threads"] = at::get_num_threads();
}
BENCHMARK(BM_step)
    ->Args({16000, 1})
    ->Args({1000, 16})
    ->Args({64, 64})
    ->Args({1, 256})
    ->Iterations(11)
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ds::zero
