// Signs and blocks of integers on a GPU: the bytes of kernels/ref/codes.cpp.
#include "kernels/codes.h"

#include "kernels/block_scale.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/entries.cuh"
#include "kernels/cuda/piece_list.cuh"
#include "kernels/fake_quant.h"
#include "kernels/small_float.h"
#include "kernels/sum_order.h"

namespace ds::kernels::cuda {
namespace {

constexpr int kWarp = 32, kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kSumLanes == kWarp, "a warp adds one block, a thread one lane");

__device__ inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// Elements [i, i + n) of `data`, n <= kPack; in one access where `packed`.
__device__ inline void load_some(const void* data, DType dtype, size_t i, size_t n, bool packed, float (&x)[kPack]) {
  if (packed && n == kPack) return load(data, dtype, i, x);
  for (size_t k = 0; k < n; ++k) {
    float one[1];
    load(data, dtype, i + k, one);
    x[k] = one[0];
  }
}

__device__ inline void store_some(void* data, DType dtype, size_t i, size_t n, bool packed, const float (&x)[kPack]) {
  if (packed && n == kPack) return store(data, dtype, i, x);
  for (size_t k = 0; k < n; ++k) {
    const float one[1] = {x[k]};
    store(data, dtype, i + k, one);
  }
}

// values + error, in `x`; `error`, which may be null, in `e`.
__device__ inline void load_with_error(const void* values, DType dtype, const float* error, size_t i, size_t n,
                                       bool packed, float (&x)[kPack], float (&e)[kPack]) {
  load_some(values, dtype, i, n, packed, x);
  if (error == nullptr) return;
  load_some(error, DType::kF32, i, n, packed, e);
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    if (k < n) x[k] += e[k];
}

// ---- signs ----
// A warp adds one block of kSumBlock elements.
__global__ void error_blocks_kernel(const __grid_constant__ PieceList<ErrorSum> list, double* block_sums) {
  const unsigned block = blockIdx.x * unsigned{kWarps} + threadIdx.x / kWarp;
  const size_t lane = threadIdx.x % kWarp;
  if (block >= list.ends[list.count - 1]) return;  // a whole warp
  const int one = list.find(block);
  const ErrorSum& run = list.pieces[one];
  const size_t begin = list.begin(one, block, kSumBlock), end = smaller(begin + kSumBlock, run.numel);
  double sum = 0;
  for (size_t i = begin + lane; i < end; i += kWarp) {
    const double x = run.error != nullptr ? run.values[i] + run.error[i] : run.values[i];
    sum += x * x;
  }
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2) sum += __shfl_down_sync(kAllLanes, sum, width);
  if (lane == 0) block_sums[block] = sum;
}

// A block of threads adds the blocks of one run.
__global__ void error_runs_kernel(const __grid_constant__ PieceList<ErrorSum> list, const double* block_sums,
                                  double* run_sums) {
  DS_SHARED(double, lanes, [kSumBlockLanes]);
  const unsigned first = blockIdx.x == 0 ? 0 : list.ends[blockIdx.x - 1];
  double mine = 0;
  for (unsigned b = first + threadIdx.x; b < list.ends[blockIdx.x]; b += kSumBlockLanes) mine += block_sums[b];
  lanes[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned width = kSumBlockLanes / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) lanes[threadIdx.x] += lanes[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) run_sums[blockIdx.x] = lanes[0];
}

// Runs may share a sum: the first of them adds them all, in order.
__global__ void add_runs_kernel(const __grid_constant__ PieceList<ErrorSum> list, const double* run_sums) {
  const int run = static_cast<int>(threadIdx.x);
  if (run >= list.count) return;
  double* const sum = list.pieces[run].sum;
  for (int before = 0; before < run; ++before)
    if (list.pieces[before].sum == sum) return;
  double total = *sum;
  for (int k = run; k < list.count; ++k)
    if (list.pieces[k].sum == sum) total += run_sums[k];
  *sum = total;
}

void sum_squares_with_error(const Launch& launch, const ErrorSum* runs, size_t count) {
  constexpr int kMax = PieceList<ErrorSum>::kMax;
  static_assert(kMax <= kThreads, "a thread for each run of a launch");
  size_t most = 0;
  for_piece_lists(runs, count, kSumBlock, [&](const PieceList<ErrorSum>&, unsigned blocks) {
    if (blocks > most) most = blocks;
  });
  if (most == 0) return;
  auto* sums = static_cast<double*>(launch.scratch->allocate((most + kMax) * sizeof(double)));
  if (sums == nullptr) return;  // whoever passed the scratch knows
  for_piece_lists(runs, count, kSumBlock, [&](const PieceList<ErrorSum>& list, unsigned blocks) {
    launch_kernel(launch, &error_blocks_kernel, (blocks + kWarps - 1) / kWarps, kThreads, 0, list, sums);
    launch_kernel(launch, &error_runs_kernel, list.count, kSumBlockLanes, 0, list, sums, sums + most);
    launch_kernel(launch, &add_runs_kernel, 1, kThreads, 0, list, sums + most);
  });
}

constexpr size_t kSignChunk = 4 * kThreads * kPack;  // elements of a block of threads

__global__ void encode_signs_kernel(const __grid_constant__ PieceList<SignRun> list) {
  const int one = list.find(blockIdx.x);
  const SignRun& run = list.pieces[one];
  const size_t begin = list.begin(one, blockIdx.x, kSignChunk), end = smaller(begin + kSignChunk, run.numel);
  const bool packed = aligned(run.values) && aligned(run.error);
  const float scale = run.error != nullptr ? *run.scale : 0.0f;
  for (size_t i = begin + threadIdx.x * size_t{kPack}; i < end; i += blockDim.x * size_t{kPack}) {
    const size_t n = smaller(end - i, kPack);
    float x[kPack], e[kPack];
    load_with_error(run.values, DType::kF32, run.error, i, n, packed, x, e);
    unsigned bits = 0;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (k >= n) break;
      const bool plus = x[k] >= 0;
      bits |= plus ? 128u >> k : 0u;
      e[k] = plus ? x[k] - scale : x[k] + scale;
    }
    run.bits[i / kPack] = static_cast<uint8_t>(bits);
    if (run.error != nullptr) store_some(run.error, DType::kF32, i, n, packed, e);
  }
}

void encode_signs(const Launch& launch, const SignRun* runs, size_t count) {
  for_piece_lists(runs, count, kSignChunk, [&](const PieceList<SignRun>& list, unsigned chunks) {
    launch_kernel(launch, &encode_signs_kernel, chunks, kThreads, 0, list);
  });
}

__global__ void decode_signs_kernel(const __grid_constant__ PieceList<SignSum> list, float factor) {
  const int one = list.find(blockIdx.x);
  const SignSum& run = list.pieces[one];
  const size_t begin = list.begin(one, blockIdx.x, kSignChunk), end = smaller(begin + kSignChunk, run.numel);
  const bool packed = aligned(run.out);
  for (size_t i = begin + threadIdx.x * size_t{kPack}; i < end; i += blockDim.x * size_t{kPack}) {
    float sum[kPack] = {};
    for (size_t part = 0; part < run.parts; ++part) {
      const size_t behind = part * run.stride;
      const float scale = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(run.scale) + behind);
      const unsigned bits = run.bits[behind + i / kPack];
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        const float x = (bits & 128u >> k) != 0 ? scale : -scale;
        sum[k] = part == 0 ? x : sum[k] + x;
      }
    }
#pragma unroll
    for (int k = 0; k < kPack; ++k) sum[k] *= factor;
    store_some(run.out, DType::kF32, i, smaller(end - i, kPack), packed, sum);
  }
}

void decode_signs(const Launch& launch, const SignSum* runs, size_t count, float factor) {
  for_piece_lists(runs, count, kSignChunk, [&](const PieceList<SignSum>& list, unsigned chunks) {
    launch_kernel(launch, &decode_signs_kernel, chunks, kThreads, 0, list, factor);
  });
}

// ---- blocks ----
// Eight numbers of `bits` bits to `codes`, of which n are there.
__device__ inline void store_codes(uint8_t* codes, int bits, size_t n, const int (&numbers)[kPack]) {
  uint64_t word = 0;
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    if (k < n) word |= static_cast<uint64_t>(numbers[k] & ((1 << bits) - 1)) << (k * bits);
  const size_t bytes = (n * bits + 7) / 8;
  if (n == kPack && reinterpret_cast<uintptr_t>(codes) % bytes == 0) {
    if (bits == 8) {
      *reinterpret_cast<uint64_t*>(codes) = word;
    } else {
      *reinterpret_cast<uint32_t*>(codes) = static_cast<uint32_t>(word);
    }
    return;
  }
  for (size_t b = 0; b < bytes; ++b) codes[b] = static_cast<uint8_t>(word >> (8 * b));
}

__device__ inline void load_codes(const uint8_t* codes, int bits, bool has_sign, size_t n, float (&numbers)[kPack]) {
  uint64_t word = 0;
  const size_t bytes = (n * bits + 7) / 8;
  if (n == kPack && reinterpret_cast<uintptr_t>(codes) % bytes == 0) {
    word = bits == 8 ? *reinterpret_cast<const uint64_t*>(codes) : *reinterpret_cast<const uint32_t*>(codes);
  } else {
    for (size_t b = 0; b < bytes; ++b) word |= static_cast<uint64_t>(codes[b]) << (8 * b);
  }
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    int number = static_cast<int>(word >> (k * bits)) & ((1 << bits) - 1);
    if (has_sign && number >= 1 << (bits - 1)) number -= 1 << bits;
    numbers[k] = static_cast<float>(number);
  }
}

// A warp for each group, a pack for each of its threads.
__global__ void encode_blocks_kernel(const __grid_constant__ PieceList<BlockRun> list, BlockCode code, DType dtype) {
  const int one = list.find(blockIdx.x);
  const BlockRun& run = list.pieces[one];
  const size_t begin = list.begin(one, blockIdx.x, kWarps * code.group) + threadIdx.x / kWarp * code.group;
  if (begin >= run.numel) return;  // a whole warp
  const size_t end = smaller(begin + code.group, run.numel), lane = threadIdx.x % kWarp;
  const bool packed = code.group % kPack == 0 && aligned(run.values) && aligned(run.error);
  float x[kPack], e[kPack], least = INFINITY, most = -INFINITY;
  int top = 0;  // bits of absolute values are in the order of the numbers, and those of infinity and NaN above all
  for (size_t i = begin + lane * kPack; i < end; i += kWarp * kPack) {
    const size_t n = smaller(end - i, kPack);
    load_with_error(run.values, dtype, run.error, i, n, packed, x, e);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (k >= n) break;
      const int bits = static_cast<int>(bits_of(x[k]) & kAbsoluteBits);
      top = bits > top ? bits : top;
      least = fminf(least, x[k]);
      most = fmaxf(most, x[k]);
    }
  }
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2) {
    const int other = __shfl_xor_sync(kAllLanes, top, width);
    top = other > top ? other : top;
    least = fminf(least, __shfl_xor_sync(kAllLanes, least, width));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, width));
  }
  const bool broken = static_cast<uint32_t>(top) >= kInfinityBits;
  const GroupScale group = broken        ? broken_scale(code)
                           : code.offset ? offset_scale(code, least, most)
                                         : symmetric_scale(code, of_bits(static_cast<uint32_t>(top)));
  if (lane == 0) store_group(code, run.scales, run.offsets, begin / code.group, group);
  const bool nan = isnan(group.scale);
  const float divisor = group.scale > 0 ? group.scale : 1.0f, rest = 1.0f - run.beta;
  for (size_t i = begin + lane * kPack; i < end; i += kWarp * kPack) {
    const size_t n = smaller(end - i, kPack);
    load_with_error(run.values, dtype, run.error, i, n, packed, x, e);
    int numbers[kPack] = {};
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (k >= n || nan) break;
      const float above = code.offset ? x[k] - group.offset : x[k];
      const float rounded = rintf(above / divisor);
      numbers[k] = static_cast<int>(rounded);
      if (run.error == nullptr) continue;
      float decoded = rounded * group.scale;
      if (code.offset) decoded += group.offset;
      e[k] = run.beta * e[k] + rest * (x[k] - decoded);
    }
    store_codes(run.codes + i * code.bits / 8, code.bits, n, numbers);
    if (run.error != nullptr && !nan) store_some(run.error, DType::kF32, i, n, packed, e);
  }
}

void encode_blocks(const Launch& launch, const BlockCode& code, DType values, const BlockRun* runs, size_t count) {
  for_piece_lists(runs, count, kWarps * code.group, [&](const PieceList<BlockRun>& list, unsigned chunks) {
    launch_kernel(launch, &encode_blocks_kernel, chunks, kThreads, 0, list, code, values);
  });
}

constexpr size_t kBlockChunk = 4 * kThreads * kPack;  // elements of a block of threads

__global__ void decode_blocks_kernel(const __grid_constant__ PieceList<BlockSum> list, BlockCode code, DType dtype,
                                     float factor, bool add) {
  const int one = list.find(blockIdx.x);
  const BlockSum& run = list.pieces[one];
  const size_t begin = list.begin(one, blockIdx.x, kBlockChunk), end = smaller(begin + kBlockChunk, run.numel);
  const bool packed = aligned(run.out), one_group = code.group % kPack == 0;
  for (size_t i = begin + threadIdx.x * size_t{kPack}; i < end; i += blockDim.x * size_t{kPack}) {
    const size_t n = smaller(end - i, kPack);
    float sum[kPack] = {};
    for (size_t part = 0; part < run.parts; ++part) {
      const size_t behind = part * run.stride;
      const void* scales = static_cast<const char*>(run.scales) + behind;
      const void* offsets = code.offset ? static_cast<const char*>(run.offsets) + behind : nullptr;
      float x[kPack];
      load_codes(run.codes + behind + i * code.bits / 8, code.bits, !code.offset, n, x);
      GroupScale group = load_group(code, scales, offsets, i / code.group);
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (k >= n) break;
        if (!one_group && k > 0) group = load_group(code, scales, offsets, (i + k) / code.group);
        x[k] *= group.scale;
        if (code.offset) x[k] += group.offset;
        sum[k] = part == 0 ? x[k] : sum[k] + x[k];
      }
    }
#pragma unroll
    for (int k = 0; k < kPack; ++k) sum[k] *= factor;
    if (add) {
      float old[kPack] = {};
      load_some(run.out, dtype, i, n, packed, old);
#pragma unroll
      for (int k = 0; k < kPack; ++k) sum[k] = old[k] + sum[k];
    }
    store_some(run.out, dtype, i, n, packed, sum);
  }
}

void decode_blocks(const Launch& launch, const BlockCode& code, DType out, const BlockSum* runs, size_t count,
                   float factor, bool add) {
  for_piece_lists(runs, count, kBlockChunk, [&](const PieceList<BlockSum>& list, unsigned chunks) {
    launch_kernel(launch, &decode_blocks_kernel, chunks, kThreads, 0, list, code, out, factor, add);
  });
}

// ---- fake quantization ----
constexpr size_t kFakePiece = 16 * kThreads;  // elements of a block of threads, all of one group

// The pieces of a call: all groups have as many.
struct FakePieces {
  size_t numel, group, per_group;
  FakePieces(const FakeQuant& how, size_t numel)
      : numel(numel), group(how.group < numel ? how.group : numel), per_group((group + kFakePiece - 1) / kFakePiece) {}
  __host__ __device__ size_t count() const { return (numel + group - 1) / group * per_group; }
  __device__ size_t begin(size_t piece) const { return piece / per_group * group + piece % per_group * kFakePiece; }
  __device__ size_t end(size_t piece) const {
    const size_t of_group = smaller(numel, (piece / per_group + 1) * group);
    return smaller(of_group, begin(piece) + kFakePiece);
  }
};

__global__ void fake_range_kernel(FakePieces pieces, DType dtype, const void* values, ValueRange* ranges) {
  DS_SHARED(ValueRange, shared, [kThreads]);
  ValueRange range = no_values();
  for (size_t i = pieces.begin(blockIdx.x) + threadIdx.x; i < pieces.end(blockIdx.x); i += blockDim.x)
    range = with_value(range, element<float>(values, dtype, i));
  shared[threadIdx.x] = range;
  __syncthreads();
  for (unsigned width = kThreads / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) shared[threadIdx.x] = with_range(shared[threadIdx.x], shared[threadIdx.x + width]);
    __syncthreads();
  }
  if (threadIdx.x == 0) ranges[blockIdx.x] = shared[0];
}

__global__ void fake_round_kernel(FakePieces pieces, FakeQuant how, DType dtype, void* values,
                                  const ValueRange* ranges) {
  const size_t first = blockIdx.x / pieces.per_group * pieces.per_group;
  ValueRange range = no_values();
  for (size_t p = 0; p < pieces.per_group; ++p) range = with_range(range, ranges[first + p]);
  const FakeSteps steps = fake_steps(how, range);
  const RandomKey key = random_key(how.seed, 0, 0);
  for (size_t i = pieces.begin(blockIdx.x) + threadIdx.x; i < pieces.end(blockIdx.x); i += blockDim.x) {
    const float x[1] = {fake_value(how, steps, key, element<float>(values, dtype, i), static_cast<uint32_t>(i))};
    store(values, dtype, i, x);
  }
}

void fake_quant(const Launch& launch, const FakeQuant& how, DType dtype, void* values, size_t numel) {
  if (numel == 0) return;
  const FakePieces pieces(how, numel);
  auto* ranges = static_cast<ValueRange*>(launch.scratch->allocate(pieces.count() * sizeof(ValueRange)));
  if (ranges == nullptr) return;  // whoever passed the scratch knows
  const auto blocks = static_cast<unsigned>(pieces.count());
  launch_kernel(launch, &fake_range_kernel, blocks, kThreads, 0, pieces, dtype, values, ranges);
  launch_kernel(launch, &fake_round_kernel, blocks, kThreads, 0, pieces, how, dtype, values, ranges);
}

// ---- small floats: a block of threads for each group ----
__global__ void encode_floats_kernel(FloatCode code, DType dtype, const void* values, uint8_t* rows) {
  DS_SHARED(float, shared, [kThreads]);
  const size_t first = blockIdx.x * code.group;
  float most = 0;
  for (size_t i = threadIdx.x; i < code.group; i += blockDim.x) {
    const float size = fabsf(element<float>(values, dtype, first + i));
    most = most != most || size <= most ? most : size;  // a NaN stays
  }
  shared[threadIdx.x] = most;
  __syncthreads();
  for (unsigned width = kThreads / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) {
      const float mine = shared[threadIdx.x], other = shared[threadIdx.x + width];
      shared[threadIdx.x] = mine != mine || other <= mine ? mine : other;
    }
    __syncthreads();
  }
  const float scale = float_scale(code, shared[0]);
  const RandomKey key = random_key(code.seed, 0, 0);
  uint8_t* row = rows + blockIdx.x * float_row(code);
  const size_t units = code.group / static_cast<size_t>(float_unit(code).codes);
  const auto value = [&](size_t i) { return element<float>(values, dtype, first + i); };
  for (size_t u = threadIdx.x; u < units; u += blockDim.x) encode_unit(code, scale, key, first, u, value, row);
  if (threadIdx.x < sizeof(scale))
    row[float_row(code) - sizeof(scale) + threadIdx.x] = static_cast<uint8_t>(float_word(scale) >> (8 * threadIdx.x));
}

__global__ void decode_floats_kernel(FloatCode code, const uint8_t* rows, DType dtype, void* out) {
  const uint8_t* row = rows + blockIdx.x * float_row(code);
  const uint8_t* last = row + float_row(code) - sizeof(float);
  uint32_t word = 0;
  for (unsigned b = 0; b < sizeof(float); ++b) word |= uint32_t{last[b]} << (8 * b);
  const size_t first = blockIdx.x * code.group, units = code.group / static_cast<size_t>(float_unit(code).codes);
  const auto put = [&](size_t i, float x) {
    const float one[1] = {x};
    store(out, dtype, first + i, one);
  };
  for (size_t u = threadIdx.x; u < units; u += blockDim.x) decode_unit(code, word_float(word), u, row, put);
}

void encode_floats(const Launch& launch, const FloatCode& code, DType dtype, const void* values, size_t groups,
                   uint8_t* rows) {
  if (groups > 0)
    launch_kernel(launch, &encode_floats_kernel, static_cast<unsigned>(groups), kThreads, 0, code, dtype, values, rows);
}
void decode_floats(const Launch& launch, const FloatCode& code, const uint8_t* rows, size_t groups, DType dtype,
                   void* out) {
  if (groups > 0)
    launch_kernel(launch, &decode_floats_kernel, static_cast<unsigned>(groups), kThreads, 0, code, rows, dtype, out);
}

constexpr CodeKernels kCodes = {kCodesAbi,      sizeof(CodeKernels), &sum_squares_with_error, &encode_signs,
                                &decode_signs,  &encode_blocks,      &decode_blocks,          &fake_quant,
                                &encode_floats, &decode_floats};

}  // namespace
}  // namespace ds::kernels::cuda

const ds::kernels::CodeKernels* ds_device_code_kernels(uint32_t abi) {
  return abi == ds::kernels::kCodesAbi ? &ds::kernels::cuda::kCodes : nullptr;
}
