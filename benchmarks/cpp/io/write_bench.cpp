// The writer of files beside plain write + fsync of the same bytes, and the checksum. DS_BENCH_DIR: where the files go
// (default /var/tmp: /tmp may be memory).
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/cores.h"
#include "base/error.h"
#include "io/crc32.h"
#include "io/file_stream.h"
#include "io/range_reader.h"

namespace ds::io {
namespace {

std::string scratch_file() {
  const char* folder = getenv("DS_BENCH_DIR");
  return std::string(folder ? folder : "/var/tmp") + "/ds_write_bench." + std::to_string(getpid());
}

std::vector<char> noise(size_t bytes) {
  std::vector<char> data(bytes);
  uint32_t x = 1;
  for (char& c : data) {
    x = x * 1664525 + 1013904223;
    c = static_cast<char>(x >> 24);
  }
  return data;
}

void set_rate(benchmark::State& state, size_t bytes) {
  state.SetBytesProcessed(static_cast<int64_t>(bytes) * state.iterations());
}

void BM_PlainWriteAndFsync(benchmark::State& state) {
  const std::vector<char> data = noise(static_cast<size_t>(state.range(0)) << 20);
  const std::string path = scratch_file();
  for (auto _ : state) {
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    for (size_t at = 0; at < data.size();) {
      const ssize_t written = ::write(file, data.data() + at, std::min<size_t>(data.size() - at, 64 << 20));
      if (written <= 0) fail(ErrorKind::kRuntime, "write failed");
      at += static_cast<size_t>(written);
    }
    ::fsync(file);
    ::close(file);
  }
  ::unlink(path.c_str());
  set_rate(state, data.size());
}

// Second argument: buffers. With checksums, which the plain one has not.
void BM_FileStream(benchmark::State& state) {
  const std::vector<char> data = noise(static_cast<size_t>(state.range(0)) << 20);
  const std::string path = scratch_file();
  Files files;
  StreamOptions options;
  options.buffers = static_cast<int>(state.range(1));
  options.threads = std::min(4, usable_cores());
  Sum sum;
  for (auto _ : state) {
    FileStream stream(files, path, data.size(), options);
    stream.write(data.data(), data.size());
    sum = stream.finish();
    state.SetLabel(stream.method());
  }
  if (sum_ranges(path, {{0, kToTheEnd}}, 1)[0] != sum.crc32) state.SkipWithError("the file is not what was written");
  ::unlink(path.c_str());
  set_rate(state, data.size());
}

BENCHMARK(BM_PlainWriteAndFsync)->Arg(1)->Arg(64)->Arg(512)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(BM_FileStream)->ArgsProduct({{1, 64, 512}, {1, 2, 4}})->Unit(benchmark::kMillisecond)->UseRealTime();

void BM_Crc32(benchmark::State& state) {
  const std::vector<char> data = noise(static_cast<size_t>(state.range(0)));
  if (crc32_of("123456789", 9) != 0xcbf43926u) state.SkipWithError("wrong checksum");
  for (auto _ : state) benchmark::DoNotOptimize(crc32_of(data.data(), data.size()));
  set_rate(state, data.size());
}
BENCHMARK(BM_Crc32)->Arg(64)->Arg(4096)->Arg(64 << 10)->Arg(64 << 20);

void BM_CopyWithCrc32(benchmark::State& state) {
  const std::vector<char> data = noise(64 << 20);
  std::vector<char> to(data.size());
  for (auto _ : state) benchmark::DoNotOptimize(copy_with_crc32(to.data(), data.data(), data.size()));
  if (to != data) state.SkipWithError("wrong copy");
  set_rate(state, data.size());
}
BENCHMARK(BM_CopyWithCrc32);

void BM_JoinCrc32(benchmark::State& state) {
  uint32_t sum = 1;
  for (auto _ : state) benchmark::DoNotOptimize(sum = crc32_joined(sum, 7, (64 << 20) + 3));
}
BENCHMARK(BM_JoinCrc32);

}  // namespace
}  // namespace ds::io
