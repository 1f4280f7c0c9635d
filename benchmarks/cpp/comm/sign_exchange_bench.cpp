// The mean of 25 million numbers over two ranks whose link is slow: as fp16 gradients, and as signs. Ranks are threads;
// a message takes its bytes / rate longer.
#include <ATen/Functions.h>
#include <benchmark/benchmark.h>

#include <memory>
#include <vector>

#include "slow_link.h"
#include "comm/compressed/sign_exchange.h"
#include "comm/transports/thread_communicator.h"
#include "kernels/table.h"

namespace ds::comm {
namespace {

constexpr int64_t kParams = 25, kNumel = 1'000'000;  // of each parameter

// Both ranks make `calls` calls; call(rank, communicator) returns what a rank repeats.
template <typename Make>
void on_two(benchmark::State& state, const Make& make) {
  double bytes_per_s = 0;
  for (auto _ : state) {
    state.PauseTiming();
    const auto threads = thread_communicators(2);
    std::vector<std::function<void()>> calls;
    for (int rank = 0; rank < 2; ++rank) calls.push_back(make(std::make_shared<SlowLink>(threads[rank], bytes_per_s)));
    call_all(calls);  // touches memory, as earlier steps of a training do
    bytes_per_s = static_cast<double>(state.range(0)) * 1e6 / 8;
    state.ResumeTiming();
    call_all(calls);
    state.PauseTiming();
    bytes_per_s = 0;
    state.ResumeTiming();
  }
}

void BM_MeanOfHalves(benchmark::State& state) {
  on_two(state, [](const CommunicatorPtr& ranks) {
    const at::Tensor grads = at::ones({kParams * kNumel}, at::kHalf);
    return [=] { ranks->all_reduce(grads, ReduceOp::kSum)->wait(); };
  });
}

void BM_MeanOfSigns(benchmark::State& state) {
  on_two(state, [](const CommunicatorPtr& ranks) {
    const int64_t numel = kParams * kNumel;
    std::vector<SignPart> parts;
    for (int64_t i = 0; i < kParams; ++i) parts.push_back({i * kNumel, kNumel, i * slice_room(kNumel, 2)});
    const at::Tensor values = at::sin(at::arange(numel, at::kFloat)), errors = at::full({numel}, 0.0f),
                     owned = at::full({kParams * slice_room(kNumel, 2)}, 0.0f);
    const auto exchange = std::make_shared<SignExchange>(ranks, parts, false, [](const SignExchange::Call& call) {
      call(*ds_code_kernels(kernels::kCodesAbi, "cpu"), {});
    });
    return [=] { exchange->mean(values, errors, owned, "values"); };
  });
}

// Mbit/s.
BENCHMARK(BM_MeanOfHalves)->Arg(100)->Arg(1000)->UseRealTime()->Unit(benchmark::kMillisecond)->Iterations(3);
BENCHMARK(BM_MeanOfSigns)->Arg(100)->Arg(1000)->UseRealTime()->Unit(benchmark::kMillisecond)->Iterations(3);

}  // namespace
}  // namespace ds::comm
