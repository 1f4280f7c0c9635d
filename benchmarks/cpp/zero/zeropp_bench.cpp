// The communication of a step at stage 3 of 25 million parameters, on two hosts of two ranks whose link is slow: two
// gathers of the weights and a reduction of the gradients, in fp16 and with ZeRO++. Ranks are threads; a message
// between hosts takes its bytes / rate longer, and each byte crosses once.
#include <ATen/Functions.h>
#include <benchmark/benchmark.h>

#include <functional>
#include <thread>
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
  const double bytes_per_s = static_cast<double>(state.range(0)) * 1e6 / 8;
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
    state.ResumeTiming();
    std::vector<std::thread> others;
    for (size_t rank = 1; rank < calls.size(); ++rank) others.emplace_back(calls[rank]);
    calls[0]();
    for (std::thread& one : others) one.join();
  }
}

void BM_StageThree(benchmark::State& state) {
  on_hosts(state, [](const Member& member) {
    const auto by_host = member.by_host;
    const at::Tensor slice = at::ones({kSlice}, at::kHalf), column = at::empty({kSlice * kHosts}, at::kHalf),
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
    const at::Tensor slice = at::sin(at::arange(kSlice, at::kFloat)).to(at::kHalf), own = at::empty({row}, at::kByte),
                     second = at::empty({kHosts, row}, at::kByte), rows = at::empty({kRanks, kHosts, row}, at::kByte),
                     whole = at::empty({kSlice * kHosts * kRanks}, at::kHalf),
                     grads = at::sin(at::arange(kSlice * kHosts * kRanks, at::kFloat)).to(at::kHalf);
    const auto reduce = std::make_shared<comm::BlockReduce>(member.ranks, by_host, kSlice);
    const comm::BlockReduce::Place place = {[](const comm::BlockReduce::Call& call) {
                                              call(*ds_code_kernels(kernels::kCodesAbi, "cpu"), kernels::Launch());
                                            },
                                            [](int64_t bytes) { return at::empty({bytes}, at::kByte); }};
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
