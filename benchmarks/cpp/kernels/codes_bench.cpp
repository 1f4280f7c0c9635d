// Coding of signs with their errors, and of blocks of integers, and the way back, beside the memory bound of the same
// loads and stores.
#include "kernels/codes.h"

#include "support.h"

namespace ds::kernels::bench {
namespace {

const CodeKernels& codes() { return *ds_cpu_code_kernels_isa(kCodesAbi, table().isa); }
const CodeKernels& ref_codes() { return *ds_cpu_code_kernels_isa(kCodesAbi, "ref"); }

bool equal(const Memory& a, const Memory& b, size_t bytes) { return std::memcmp(a.as<>(), b.as<>(), bytes) == 0; }

// As Adam with one bit does it: the scale is the norm of values + error, then their signs are sent. 20 bytes per
// element: two arrays are read, then one is read and one updated. Arguments: elements, threads.
void signs_with_error(benchmark::State& state) {
  const size_t n = state.range(0);
  Memory values(n * 4), error(n * 4), want_error(n * 4), bits(n / 8), want_bits(n / 8);
  values.fill(DType::kF32, n), error.fill(DType::kF32, n, 0.3f), want_error.fill(DType::kF32, n, 0.3f);
  ThreadPool pool(static_cast<int>(state.range(1)));
  double sum = 0, want_sum = 0;
  const float scale = 0.25f;
  const auto call = [&](const CodeKernels& kernels, const Memory& rest, const Memory& out, double* squares) {
    const ErrorSum norm = {values.as<float>(), rest.as<float>(), n, squares};
    const SignRun run = {values.as<float>(), rest.as<float>(), n, out.as<uint8_t>(), &scale};
    kernels.sum_squares_with_error({&pool}, &norm, 1);
    kernels.encode_signs({&pool}, &run, 1);
  };
  call(ref_codes(), want_error, want_bits, &want_sum);
  call(codes(), error, bits, &sum);
  if (sum != want_sum || !equal(bits, want_bits, n / 8) || !equal(error, want_error, n * 4))
    return state.SkipWithError("differs from the reference");
  const Stream reads = {values.as<float>(), {}, nullptr, n},
               updates = {values.as<float>(), {error.as<float>()}, nullptr, n};
  const Stream more = {error.as<float>(), {}, nullptr, n};
  run(
      state, n * 20, [&] { call(codes(), error, bits, &sum); }, n * 20,
      [&] {
        for (const Stream* one : {&reads, &more, &updates}) benchmark::DoNotOptimize(ds_cpu_stream({&pool}, one, 1));
      });
}

// Arguments: elements, threads, bits, dtype of the values.
void encode_blocks(benchmark::State& state) {
  const size_t n = state.range(0);
  const BlockCode code = travelling_blocks(static_cast<int>(state.range(2)));
  const DType dtype = static_cast<DType>(state.range(3));
  const size_t read = n * dtype_bytes(dtype), written = code_bytes(code, n), scales = scale_bytes(code, n);
  Memory values(read), out(written + scales), want(written + scales);
  values.fill(dtype, n);
  ThreadPool pool(static_cast<int>(state.range(1)));
  const auto call = [&](const CodeKernels& kernels, const Memory& to) {
    const BlockRun run = {values.as<>(), n, to.as<uint8_t>(), to.as<uint8_t>() + written, nullptr, nullptr, 0};
    kernels.encode_blocks({&pool}, code, dtype, &run, 1);
  };
  call(ref_codes(), want);
  call(codes(), out);
  if (!equal(out, want, written + scales)) return state.SkipWithError("differs from the reference");
  // The stream reads and writes the same numbers of bytes.
  const Stream both = {values.as<float>(), {}, out.as<float>(), written / 4};
  const Stream reads = {values.as<float>() + written / 4, {}, nullptr, (read - written) / 4};
  run(
      state, read + written, [&] { call(codes(), out); }, read + written,
      [&] {
        for (const Stream* one : {&both, &reads}) benchmark::DoNotOptimize(ds_cpu_stream({&pool}, one, 1));
      });
}

// Arguments: as above; of one part.
void decode_blocks(benchmark::State& state) {
  const size_t n = state.range(0);
  const BlockCode code = travelling_blocks(static_cast<int>(state.range(2)));
  const DType dtype = static_cast<DType>(state.range(3));
  const size_t written = n * dtype_bytes(dtype), read = code_bytes(code, n);
  Memory values(n * 4), from(read + scale_bytes(code, n)), out(written), want(written);
  values.fill(DType::kF32, n);
  ThreadPool pool(static_cast<int>(state.range(1)));
  const BlockRun coded = {values.as<>(), n, from.as<uint8_t>(), from.as<uint8_t>() + read, nullptr, nullptr, 0};
  codes().encode_blocks({&pool}, code, DType::kF32, &coded, 1);
  const auto call = [&](const CodeKernels& kernels, const Memory& to) {
    const BlockSum run = {to.as<>(), n, from.as<uint8_t>(), from.as<uint8_t>() + read, nullptr, 1, 0};
    kernels.decode_blocks({&pool}, code, dtype, &run, 1, 0.5f, false);
  };
  call(ref_codes(), want);
  call(codes(), out);
  if (!equal(out, want, written)) return state.SkipWithError("differs from the reference");
  const Stream both = {from.as<float>(), {}, out.as<float>(), read / 4};
  const Stream writes = {from.as<float>(), {}, out.as<float>() + read / 4, read / 4};
  const size_t times = written / read;  // the same codes again are in a cache, as the codes of a block are
  run(
      state, read + written, [&] { call(codes(), out); }, read * (times + 1),
      [&] {
        for (size_t i = 0; i < times; ++i)
          benchmark::DoNotOptimize(ds_cpu_stream({&pool}, i == 0 ? &both : &writes, 1));
      });
}

// Arguments: as above, and elements of a group. The stream reads and writes the same bytes.
void fake_quant(benchmark::State& state) {
  const size_t n = state.range(0);
  const DType dtype = static_cast<DType>(state.range(2));
  const FakeQuant how = {8, static_cast<size_t>(state.range(3)), false, false, 0};
  const size_t bytes = n * dtype_bytes(dtype);
  Memory values(bytes), want(bytes);
  values.fill(dtype, n), want.fill(dtype, n);
  ThreadPool pool(static_cast<int>(state.range(1)));
  codes().fake_quant({&pool}, how, dtype, values.as<>(), n);
  ref_codes().fake_quant({&pool}, how, dtype, want.as<>(), n);
  if (!equal(values, want, bytes)) return state.SkipWithError("differs from the reference");
  const Stream both = {values.as<float>(), {}, want.as<float>(), bytes / 4};
  run(
      state, 2 * bytes, [&] { codes().fake_quant({&pool}, how, dtype, values.as<>(), n); }, 2 * bytes,
      [&] { benchmark::DoNotOptimize(ds_cpu_stream({&pool}, &both, 1)); });
}

BENCHMARK(signs_with_error)
    ->ArgNames({"n", "threads"})
    ->ArgsProduct({{16 << 20}, {1, 2}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

const std::vector<std::vector<int64_t>> kBlockCases = {
    {16 << 20}, {1, 2}, {4, 8}, {static_cast<int>(DType::kF32), static_cast<int>(DType::kBF16)}};
BENCHMARK(encode_blocks)
    ->ArgNames({"n", "threads", "bits", "dtype"})
    ->ArgsProduct(kBlockCases)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(decode_blocks)
    ->ArgNames({"n", "threads", "bits", "dtype"})
    ->ArgsProduct(kBlockCases)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

BENCHMARK(fake_quant)
    ->ArgNames({"n", "threads", "dtype", "group"})
    ->ArgsProduct({{16 << 20}, {1, 2}, kBlockCases[3], {512, 16 << 20}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ds::kernels::bench
