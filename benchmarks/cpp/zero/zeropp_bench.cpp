// The communication of a step at stage 3 of 25 million parameters, on two hosts of two ranks whose link is slow: two
// gathers of the weights and a reduction of the gradients, in fp16 and with ZeRO++. Ranks are threads; a message
// between hosts takes its bytes / rate longer, and each byte crosses once.
#include <ATen/Functions.h>
#include <benchmark/benchmark.h>

#include <functional>
#include <memory>
#include <vector>

#include "../comm/slow_link.h"
#include "comm/compressed/block_reduce.h"
#include "comm/transports/thread_communicator.h"
#include "kernels/table.h"
#include "zero/spaces/slice_codec.h"

namespace ds::zero {
namespace {

using comm::CommunicatorPtr;

constexpr int64_t kSlice = 25'000'000 / 4 / 512 * 512;  // of each rank
constexpr int kHosts = 2, kRanks = 2;                   // of each host

struct Member {
  CommunicatorPtr ranks;
  comm::HostRanks by_host;
};

// All ranks make `calls` calls; make(member) returns what a rank repeats.
void on_hosts(benchmark::State& state, const std::function<std::function<void()>(const Member&)>& make) {
  double bytes_per_s = 0;
  for (auto _ : state) {
    state.PauseTiming();
    std::vector<Member> members(kHosts * kRanks);
    const auto all = comm::thread_communicators(kHosts * kRanks);
    for (int host = 0; host < kHosts; ++host) {
      const auto inner = comm::thread_communicators(kRanks);
      for (int local = 0; local < kRanks; ++local) {
        Member& one = members[host * kRanks + local];
        one.ranks = all[host * kRanks + local];
        one.by_host.hosts = {{{0, 1}, {2, 3}}, host, local};
        one.by_host.inner = inner[local];
      }
    }
    for (int local = 0; local < kRanks; ++local) {
      const auto outer = comm::thread_communicators(kHosts);
      for (int host = 0; host < kHosts; ++host)
        members[host * kRanks + local].by_host.outer = std::make_shared<comm::SlowLink>(outer[host], bytes_per_s);
    }
    std::vector<std::function<void()>> calls;
    for (const Member& member : members) calls.push_back(make(member));
    comm::call_all(calls);  // touches memory, as earlier steps of a training do
    bytes_per_s = static_cast<double>(state.range(0)) * 1e6 / 8;
    state.ResumeTiming();
    comm::call_all(calls);
    state.PauseTiming();
    bytes_per_s = 0;
    state.ResumeTiming();
  }
}

void BM_StageThree(benchmark::State& state) {
  on_hosts(state, [](const Member& member) {
    const auto by_host = member.by_host;
    const at::Tensor slice = at::ones({kSlice}, at::kHalf), column = at::full({kSlice * kHosts}, 1, at::kHalf),
                     whole = at::ones({kSlice * kHosts * kRanks}, at::kHalf);
    return [=] {
      for (int gather = 0; gather < 2; ++gather) {  // for forward and for backward
        by_host.outer->all_gather(slice, column)->wait();
        by_host.inner->all_gather(column, whole)->wait();
      }
      by_host.inner->reduce_scatter(whole, column)->wait();
      by_host.outer->reduce_scatter(column, slice)->wait();
    };
  });
}

void BM_ZeroPlusPlus(benchmark::State& state) {
  on_hosts(state, [](const Member& member) {
    const auto by_host = member.by_host;
    const SliceCodecPtr codec = SliceCodec::travelling(at::kCPU, 1);
    const int64_t row = codec->row_bytes(kSlice);
    const at::Tensor slice = at::sin(at::arange(kSlice, at::kFloat)).to(at::kHalf), own = at::full({row}, 0, at::kByte),
                     second = at::full({kHosts, row}, 0, at::kByte),
                     rows = at::full({kRanks, kHosts, row}, 0, at::kByte),
                     whole = at::full({kSlice * kHosts * kRanks}, 1, at::kHalf),
                     grads = at::sin(at::arange(kSlice * kHosts * kRanks, at::kFloat)).to(at::kHalf);
    const auto reduce = std::make_shared<comm::BlockReduce>(member.ranks, by_host, kSlice);
    const comm::BlockReduce::Place place = {
        [](const comm::BlockReduce::Call& call) {
          call(*ds_code_kernels(kernels::kCodesAbi, "cpu"), kernels::Launch());
        },
        [kept = std::make_shared<std::vector<at::Tensor>>()](int64_t bytes) {  // memory that nobody has any more
          for (const at::Tensor& one : *kept)
            if (one.numel() == bytes && one.use_count() == 1) return one;
          kept->push_back(at::full({bytes}, 0, at::kByte));
          return kept->back();
        }};
    return [=] {
      codec->encode({SliceCodec::pair(slice, own)});
      by_host.outer->all_gather(own, second.flatten())->wait();
      for (int gather = 0; gather < 2; ++gather) {
        by_host.inner->all_gather(second.flatten(), rows.flatten())->wait();
        std::vector<SliceCodec::Pair> pairs;
        for (int i = 0; i < kHosts * kRanks; ++i)
          pairs.push_back(SliceCodec::pair(whole.narrow(0, i * kSlice, kSlice), rows[i / kHosts][i % kHosts]));
        codec->decode(pairs);
      }
      reduce->start(place, grads, {}, "grads")->wait();
      reduce->receive(place, slice, {});
      reduce->send_again(place, "grads");
      reduce->finish(place, slice);
    };
  });
}

// Mbit/s.
BENCHMARK(BM_StageThree)->Arg(100)->Arg(1000)->UseRealTime()->Unit(benchmark::kMillisecond)->Iterations(3);
BENCHMARK(BM_ZeroPlusPlus)->Arg(100)->Arg(1000)->UseRealTime()->Unit(benchmark::kMillisecond)->Iterations(3);

}  // namespace
}  // namespace ds::zero
