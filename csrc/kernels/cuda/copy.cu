// dst = src * scale and dst += src * scale, converting between element types.
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/entries.cuh"

namespace ds::kernels::cuda {
namespace {

// dst and src may be the same memory: each thread reads its elements before it writes them.
template <typename Acc, bool kAdd>
__global__ void copy_kernel(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, Acc scale) {
  const size_t thread = blockIdx.x * size_t{blockDim.x} + threadIdx.x, threads = gridDim.x * size_t{blockDim.x};
  for_elements(0, n, thread, threads, aligned(dst) && aligned(src), [&](size_t i, auto width) {
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

}  // namespace ds::kernels::cuda
