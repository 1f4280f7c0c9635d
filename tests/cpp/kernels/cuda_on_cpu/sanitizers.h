// The sanitizers' interfaces for fibers, memory and order; without a sanitizer, functions that nothing calls.
// The build says which there is, because the runtime itself is compiled without the thread sanitizer.
#pragma once
#include <cstddef>

namespace cuda_on_cpu {

#ifdef CUDA_ON_CPU_ADDRESS
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif
#ifdef CUDA_ON_CPU_THREAD
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
void __asan_poison_memory_region(const volatile void* at, size_t size);
void __asan_unpoison_memory_region(const volatile void* at, size_t size);
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
}

#ifdef CUDA_ON_CPU_ADDRESS
inline void start_switch(void** fake, const void* bottom, size_t size) {
  __sanitizer_start_switch_fiber(fake, bottom, size);
}
inline void finish_switch(void* fake, const void** bottom, size_t* size) {
  __sanitizer_finish_switch_fiber(fake, bottom, size);
}
inline void poison(const void* at, size_t size) { __asan_poison_memory_region(at, size); }
inline void unpoison(const void* at, size_t size) { __asan_unpoison_memory_region(at, size); }
#else
inline void start_switch(void**, const void*, size_t) {}
inline void finish_switch(void*, const void**, size_t*) {}
inline void poison(const void*, size_t) {}
inline void unpoison(const void*, size_t) {}
#endif

#ifdef CUDA_ON_CPU_THREAD
constexpr unsigned kWithoutOrder = 1;  // a switch is no synchronisation: only barriers are
inline void* make_tsan_fiber() { return __tsan_create_fiber(0); }
inline void destroy_tsan_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void* switch_tsan_fiber(void* fiber) {
  void* before = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber, kWithoutOrder);
  return before;
}
// What is done before order_before(at) is seen after order_after(at).
inline void order_before(void* at) { __tsan_release(at); }
inline void order_after(void* at) { __tsan_acquire(at); }
#else
inline void* make_tsan_fiber() { return nullptr; }
inline void destroy_tsan_fiber(void*) {}
inline void* switch_tsan_fiber(void*) { return nullptr; }
inline void order_before(void*) {}
inline void order_after(void*) {}
#endif

}  // namespace cuda_on_cpu
