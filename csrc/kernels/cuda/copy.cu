// dst = src * scale and dst += src * scale, converting between element types.
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/entries.cuh"
#include "kernels/cuda/piece_list.cuh"

namespace ds::kernels::cuda {
namespace {

// Elements [begin, end). dst and src may be the same memory: each thread reads its elements before it writes them.
template <typename Acc, bool kAdd>
__device__ void copy_elements(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t begin, size_t end,
                              size_t thread, size_t threads, Acc scale) {
  for_elements(begin, end, thread, threads, aligned(dst) && aligned(src), [&](size_t i, auto width) {
    Acc x[width.value];
    load(src, src_dtype, i, x);
    if constexpr (kAdd) {
      Acc old[width.value];
      load(dst, dst_dtype, i, old);
#pragma unroll
      for (int k = 0; k < width.value; ++k) x[k] = old[k] + x[k] * scale;
    } else {
#pragma unroll
      for (int k = 0; k < width.value; ++k) x[k] *= scale;
    }
    store(dst, dst_dtype, i, x);
  });
}

template <typename Acc, bool kAdd>
__global__ void copy_kernel(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, Acc scale) {
  const size_t thread = blockIdx.x * size_t{blockDim.x} + threadIdx.x, threads = gridDim.x * size_t{blockDim.x};
  copy_elements<Acc, kAdd>(dst, dst_dtype, src, src_dtype, 0, n, thread, threads, scale);
}

constexpr size_t kChunk = 16 * kThreads * kPack;  // elements that one block moves

template <typename Acc, bool kAdd>
__global__ void move_kernel(const __grid_constant__ PieceList<Move> list, DType to, DType from, Acc scale) {
  const int one = list.find(blockIdx.x);
  const Move& move = list.pieces[one];
  const size_t begin = list.begin(one, blockIdx.x, kChunk);
  const size_t end = begin + kChunk < move.numel ? begin + kChunk : move.numel;
  copy_elements<Acc, kAdd>(move.to, to, move.from, from, begin, end, threadIdx.x, blockDim.x, scale);
}

template <typename Acc>
void launch_moves(const Launch& launch, const Move* moves, size_t count, DType to, DType from, float scale, bool add) {
  for_piece_lists(moves, count, kChunk, [&](const PieceList<Move>& list, unsigned chunks) {
    launch_kernel(launch, add ? &move_kernel<Acc, true> : &move_kernel<Acc, false>, chunks, kThreads, 0, list, to, from,
                  static_cast<Acc>(scale));
  });
}

template <bool kAdd>
void launch_copy(const Launch& launch, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n,
                 float scale) {
  if (n == 0) return;
  const unsigned blocks = blocks_for(n, kPack);
  if (dst_dtype == DType::kF64 || src_dtype == DType::kF64) {
    launch_kernel(launch, &copy_kernel<double, kAdd>, blocks, kThreads, 0, dst, dst_dtype, src, src_dtype, n, scale);
  } else {
    launch_kernel(launch, &copy_kernel<float, kAdd>, blocks, kThreads, 0, dst, dst_dtype, src, src_dtype, n, scale);
  }
}

}  // namespace

void copy(const Launch& launch, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, float scale) {
  if (dst_dtype == src_dtype && scale == 1.0f) {
    if (dst != src && n != 0)
      cudaMemcpyAsync(dst, src, n * dtype_bytes(dst_dtype), cudaMemcpyDeviceToDevice, stream_of(launch));
    return;
  }
  launch_copy<false>(launch, dst, dst_dtype, src, src_dtype, n, scale);
}

void accumulate(const Launch& launch, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n,
                float scale) {
  launch_copy<true>(launch, dst, dst_dtype, src, src_dtype, n, scale);
}

void move_all(const Launch& launch, const Move* moves, size_t count, DType to, DType from, float scale, bool add) {
  const bool wide = to == DType::kF64 || from == DType::kF64;
  (wide ? launch_moves<double> : launch_moves<float>)(launch, moves, count, to, from, scale, add);
}

}  // namespace ds::kernels::cuda
