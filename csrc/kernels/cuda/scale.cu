// data *= factor on a GPU. THE EXEMPLAR: a kernel, and the launcher that is its entry in the table. A launcher takes
// raw pointers and a stream, never waits, and reports nothing: a failed launch is found by KernelTable::last_error.
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/entries.cuh"

namespace ds::kernels::cuda {
namespace {

// Acc: what the arithmetic is done in, double for fp64 data and float for everything else.
template <typename Acc>
__global__ void scale_kernel(void* data, DType dtype, size_t n, Acc factor) {
  const size_t thread = blockIdx.x * size_t{blockDim.x} + threadIdx.x, threads = gridDim.x * size_t{blockDim.x};
  for_elements(0, n, thread, threads, aligned(data), [&](size_t i, auto width) {
    Acc x[width.value];
    load(data, dtype, i, x);
#pragma unroll
    for (int k = 0; k < width.value; ++k) x[k] *= factor;
    store(data, dtype, i, x);
  });
}

}  // namespace

void scale(const Launch& launch, void* data, DType dtype, size_t n, float factor) {
  if (n == 0) return;  // a launch of no blocks is an error
  const unsigned blocks = blocks_for(n, kPack);
  if (dtype == DType::kF64) {
    launch_kernel(launch, &scale_kernel<double>, blocks, kThreads, 0, data, dtype, n, factor);
  } else {
    launch_kernel(launch, &scale_kernel<float>, blocks, kThreads, 0, data, dtype, n, factor);
  }
}

}  // namespace ds::kernels::cuda
