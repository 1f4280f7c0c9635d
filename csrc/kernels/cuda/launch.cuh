// Launches of kernels, and arrays in the memory of a thread block. A compiler without CUDA needs other text here alone:
// tests compile the same kernels for the CPU (tests/cpp/kernels/cuda_on_cpu).
#pragma once
#include <cuda_runtime.h>

#include <utility>

#include "kernels/launch.h"

#if defined(__CUDACC__)
// `Type name dimensions`, one for all threads of the block: DS_SHARED(float, sums, [32]). In a function.
#define DS_SHARED(Type, name, dimensions) __shared__ Type name dimensions
// The bytes that the launch asks for, as an array `name` of unsigned char. In a function.
#define DS_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

namespace ds::kernels::cuda {

inline cudaStream_t stream_of(const Launch& launch) { return static_cast<cudaStream_t>(launch.stream); }

// Every launch there is: `blocks` x `threads`, with `shared` bytes of dynamic shared memory for each block.
template <typename... Parameters, typename... Arguments>
void launch_kernel(const Launch& launch, void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                   size_t shared, Arguments&&... arguments) {
#if defined(__CUDACC__)
  kernel<<<blocks, threads, shared, stream_of(launch)>>>(std::forward<Arguments>(arguments)...);
#else
  cuda_on_cpu::launch(stream_of(launch), blocks, threads, shared, kernel, std::forward<Arguments>(arguments)...);
#endif
}

}  // namespace ds::kernels::cuda
