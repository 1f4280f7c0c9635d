// The cost of an Op above the transport that carries it, and the collectives of two ranks through shared memory.
#include <ATen/Functions.h>
#include <benchmark/benchmark.h>

#include <atomic>
#include <thread>

#include "comm/transports/shm_communicator.h"
#include "comm/transports/thread_communicator.h"

namespace ds::comm {
namespace {

// Carries everything by doing nothing: what is measured is the way to it.
class Nothing : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::string name() const override { return "nothing"; }
  bool carries(const Op&) const override { return true; }
  PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }
  virtual WorkPtr bare(const at::Tensor& tensor, ReduceOp op, const std::string& tag) {
    benchmark::DoNotOptimize(tensor.data_ptr());
    return std::make_shared<DoneWork>();
  }

 protected:
  WorkPtr start(const Op& op) override { return bare(op.out, op.reduce, op.tag); }
};

const char* const kTag = "module.transformer.layers.11.attention.query_key_value.weight";

void BM_BareTransport(benchmark::State& state) {
  Nothing transport;
  Nothing* volatile hidden = &transport;
  const at::Tensor tensor = at::zeros({16});
  const std::string tag = kTag;
  for (auto _ : state) hidden->bare(tensor, ReduceOp::kSum, tag)->wait();
}
BENCHMARK(BM_BareTransport);

void BM_Op(benchmark::State& state) {
  Nothing transport;
  const at::Tensor tensor = at::zeros({16});
  const std::string tag = kTag;
  for (auto _ : state) transport.all_reduce(tensor, ReduceOp::kSum, tag)->wait();
}
BENCHMARK(BM_Op);

// Two ranks as threads. The second does what the first does, as often.
template <typename Call>
void on_two(benchmark::State& state, const Call& call) {
  auto inners = thread_communicators(2);
  std::atomic<int64_t> wanted{0};
  std::atomic<bool> over{false};
  const auto connect = [&](int rank) { return shm_communicator(inners[rank], std::chrono::seconds(60)); };
  std::thread second([&] {
    const auto comm = connect(1);
    for (int64_t done = 0; !over;)
      if (done < wanted) {
        call(1, *comm);
        ++done;
      }
  });
  const auto comm = connect(0);
  for (auto _ : state) {
    ++wanted;
    call(0, *comm);
  }
  over = true;
  second.join();
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void BM_AllReduce(benchmark::State& state) {
  const at::Tensor whole[2] = {at::ones({state.range(0) / 4}), at::ones({state.range(0) / 4})};
  on_two(state, [&](int rank, Communicator& comm) { comm.all_reduce(whole[rank], ReduceOp::kMax)->wait(); });
}
void BM_AllGather(benchmark::State& state) {
  const int64_t n = state.range(0) / 4;
  const at::Tensor mine[2] = {at::ones({n / 2}), at::ones({n / 2})}, all[2] = {at::ones({n}), at::ones({n})};
  on_two(state, [&](int rank, Communicator& comm) { comm.all_gather(mine[rank], all[rank])->wait(); });
}
void BM_AllToAll(benchmark::State& state) {
  const int64_t n = state.range(0) / 4;
  const at::Tensor from[2] = {at::ones({n}), at::ones({n})}, to[2] = {at::ones({n}), at::ones({n})};
  on_two(state, [&](int rank, Communicator& comm) { comm.all_to_all(from[rank], to[rank])->wait(); });
}
BENCHMARK(BM_AllReduce)->Arg(4 << 10)->Arg(1 << 20)->Arg(64 << 20)->UseRealTime();
BENCHMARK(BM_AllGather)->Arg(4 << 10)->Arg(1 << 20)->Arg(64 << 20)->UseRealTime();
BENCHMARK(BM_AllToAll)->Arg(4 << 10)->Arg(1 << 20)->Arg(64 << 20)->UseRealTime();

}  // namespace
}  // namespace ds::comm
