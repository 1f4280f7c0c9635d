// The sanitizers' interfaces for fibers, memory and order; without a sanitizer they do nothing. The build says which
// there is (cmake/CudaOnCpu.cmake), because the machine itself is compiled without the thread sanitizer.
#pragma once
#include <sanitizer/asan_interface.h>
#include <sanitizer/tsan_interface.h>

namespace cuda_on_cpu {

#ifdef CUDA_ON_CPU_ADDRESS
constexpr bool kAddressSanitizer = true;
#define CUDA_ON_CPU_ADDRESS_CALL(call) call
#else
constexpr bool kAddressSanitizer = false;
#define CUDA_ON_CPU_ADDRESS_CALL(call) (void)0
#endif
#ifdef CUDA_ON_CPU_THREAD
constexpr bool kThreadSanitizer = true;
#define CUDA_ON_CPU_THREAD_CALL(call) call
#else
constexpr bool kThreadSanitizer = false;
#define CUDA_ON_CPU_THREAD_CALL(call) (void)0
#endif

inline void poison(const void* at, size_t size) { CUDA_ON_CPU_ADDRESS_CALL(__asan_poison_memory_region(at, size)); }
inline void unpoison(const void* at, size_t size) { CUDA_ON_CPU_ADDRESS_CALL(__asan_unpoison_memory_region(at, size)); }
// Writes before order_before(at) are seen after order_after(at).
inline void order_before(void* at) { CUDA_ON_CPU_THREAD_CALL(__tsan_release(at)); }
inline void order_after(void* at) { CUDA_ON_CPU_THREAD_CALL(__tsan_acquire(at)); }

}  // namespace cuda_on_cpu
