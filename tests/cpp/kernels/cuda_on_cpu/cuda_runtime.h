// The part of CUDA that csrc/kernels/cuda needs, for the host's compiler. Other parts do not compile: a kernel that
// needs more extends this file, and says there what the CPU must do to show a fault.
#pragma once
#include <math.h>
#include <stdint.h>

#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "runtime.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(threads)

#define threadIdx (::cuda_on_cpu::position().thread)
#define blockIdx (::cuda_on_cpu::position().block)
#define blockDim (::cuda_on_cpu::position().block_size)
#define gridDim (::cuda_on_cpu::position().grid_size)

// A static array: each declaration, in each instance of a template, is one array of the block.
#define DS_SHARED(Type, name, dimensions)                                       \
  typedef Type name##_array dimensions;                                         \
  static const char name##_declaration = 0;                                     \
  name##_array& name = *static_cast<name##_array*>(::cuda_on_cpu::shared_array( \
      &name##_declaration, sizeof(name##_array), alignof(name##_array), {__FILE__, __LINE__}))
#define DS_DYNAMIC_SHARED(name) unsigned char* const name = static_cast<unsigned char*>(::cuda_on_cpu::dynamic_shared())

// ---- the host's side ----
using cudaStream_t = void*;
enum cudaError_t {  // the numbers of CUDA
  cudaSuccess = 0,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };

// Whether a launch of the calling thread failed since it asked last; its report is the text of cudaErrorLaunchFailure.
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream);

namespace cuda_on_cpu {

template <typename... Parameters, typename... Arguments>
void launch(cudaStream_t stream, unsigned blocks, unsigned threads, size_t shared, void (*kernel)(Parameters...),
            Arguments&&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= 4096, "the parameters of a kernel have 4 KB");
  launch(stream, {blocks, threads, shared},
         [kernel, values = std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)] {
           std::apply(kernel, values);
         });
}

template <typename T>
T of_lane(unsigned mask, T value, unsigned lane, Site site) {
  static_assert(std::is_arithmetic_v<T>, "shuffles take numbers");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = of_lane_bits(mask, bits, lane, site);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned lane() { return position().thread.x % kWarp; }

}  // namespace cuda_on_cpu

// ---- the device's side: `file` and `line` are where a kernel calls ----
#define CUDA_ON_CPU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(CUDA_ON_CPU_SITE) { cuda_on_cpu::sync_block({file, line}); }
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_ON_CPU_SITE) { cuda_on_cpu::sync_warp(mask, {file, line}); }
template <typename T>
T __shfl_sync(unsigned mask, T value, int from, CUDA_ON_CPU_SITE) {
  return cuda_on_cpu::of_lane(mask, value, static_cast<unsigned>(from) % cuda_on_cpu::kWarp, {file, line});
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, CUDA_ON_CPU_SITE) {
  return cuda_on_cpu::of_lane(mask, value, (cuda_on_cpu::lane() ^ bits) % cuda_on_cpu::kWarp, {file, line});
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, CUDA_ON_CPU_SITE) {
  const unsigned own = cuda_on_cpu::lane(), from = own + by;
  return cuda_on_cpu::of_lane(mask, value, from < cuda_on_cpu::kWarp ? from : own, {file, line});
}

// Accesses that no order is needed for: nobody watches them.
template <typename T>
__attribute__((noinline, no_sanitize("thread"))) T atomicOr(T* data, T bits) {
  return __atomic_fetch_or(data, bits, __ATOMIC_RELAXED);
}

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
