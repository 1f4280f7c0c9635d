// The cost of a lease: of a plane that rests where the work is (at most 1 us), of scratch, of a block in other memory.
#include <benchmark/benchmark.h>

#include <string>

#include "storage/shard_storage.h"

namespace ds::storage {
namespace {

constexpr int64_t kNumel = 1 << 20;

Cuts cuts_of(int64_t blocks) {
  Cuts cuts;
  for (int64_t b = 1; b <= blocks; ++b) cuts.push_back(kNumel * b / blocks);
  return cuts;
}

// `blocks`: of the plane; each lease is of one.
void ResidentLease(benchmark::State& state) {
  ShardStorage storage(c10::Device(at::kCPU));
  const int64_t blocks = state.range(0);
  const PlaneId plane = storage.add("masters", kNumel, at::kFloat, {}, cuts_of(blocks));
  int64_t b = 0;
  for (auto _ : state) {
    const plan::Range range{kNumel * b / blocks, kNumel * (b + 1) / blocks};
    const Lease lease = storage.acquire(plane, range, Access::kUpdate, Medium::kDevice);
    benchmark::DoNotOptimize(lease.data().data_ptr());
    b = (b + 1) % blocks;
  }
}
BENCHMARK(ResidentLease)->Arg(1)->Arg(16)->Arg(1024);

void ScratchLease(benchmark::State& state) {
  ShardStorage storage(c10::Device(at::kCPU));
  for (auto _ : state) {
    const Lease lease = storage.scratch(kNumel, at::kFloat, Medium::kDevice);
    benchmark::DoNotOptimize(lease.data().data_ptr());
  }
}
BENCHMARK(ScratchLease);

// Blocks of 64 Ki elements (256 KiB): fetched, and written back in the background.
void StagedLease(benchmark::State& state) {
  ShardStorage storage(c10::Device(at::kCPU));
  Placement placement;
  placement.rest = static_cast<Medium>(state.range(0));
  placement.folder = "/tmp";
  const PlaneId plane = storage.add("masters", kNumel, at::kFloat, placement, cuts_of(16));
  storage.acquire(plane, {0, kNumel}, Access::kWrite, Medium::kDevice).data().zero_();
  int64_t b = 0;
  for (auto _ : state) {
    const plan::Range range{kNumel * b / 16, kNumel * (b + 1) / 16};
    const Lease lease = storage.acquire(plane, range, Access::kUpdate, Medium::kDevice);
    b = (b + 1) % 16;
    storage.prefetch(plane, {kNumel * b / 16, kNumel * (b + 1) / 16}, Medium::kDevice);
  }
  storage.settle();
  state.SetBytesProcessed(state.iterations() * kNumel / 16 * 4);
}
BENCHMARK(StagedLease)->Arg(1)->Arg(2)->ArgNames({"medium"})->UseRealTime();

}  // namespace
}  // namespace ds::storage
