// The calls that the compiler puts before each access, and where in the source they stand.
#include <dlfcn.h>

#include "memory.h"

namespace cuda_on_cpu {

std::string source_of(const void* instruction) {
  Dl_info library;
  if (dladdr(instruction, &library) == 0 || library.dli_fname == nullptr) return "an unknown place";
  const auto offset = static_cast<const char*>(instruction) - static_cast<const char*>(library.dli_fbase) - 1;
  char command[4096], line[4096] = "";
  std::snprintf(command, sizeof command, "addr2line -e '%s' 0x%zx", library.dli_fname, static_cast<size_t>(offset));
  if (FILE* pipe = popen(command, "r")) {
    if (std::fgets(line, sizeof line, pipe) != nullptr) line[std::strcspn(line, " \n")] = '\0';
    pclose(pipe);
  }
  return line[0] != '\0' ? line : "an unknown place";
}

#if defined(CUDA_ON_CPU_ADDRESS) || defined(CUDA_ON_CPU_THREAD)
void set_watch(const Watch*) {}
#else
namespace {

__attribute__((tls_model("initial-exec"))) thread_local const Watch* watching = nullptr;

template <bool kWrites>
inline void access(const void* data, size_t bytes, const void* from) {
  const Watch* w = watching;
  const auto at = reinterpret_cast<uintptr_t>(data);
  if (w == nullptr || at - w->stacks < w->stack_bytes) return;
  if (w->shared->contains(at)) {
    if (const char* wrong = w->shared->access(at, bytes, kWrites)) w->fail(wrong, from);
  } else if (kWrites || w->log->reads()) {
    w->log->note(at, bytes, kWrites ? from : nullptr);
  }
}

}  // namespace

void set_watch(const Watch* watch) { watching = watch; }

#define CUDA_ON_CPU_ACCESS(bytes)                                                                       \
  void __tsan_read##bytes(void* at) { access<false>(at, bytes, __builtin_return_address(0)); }          \
  void __tsan_write##bytes(void* at) { access<true>(at, bytes, __builtin_return_address(0)); }          \
  void __tsan_volatile_read##bytes(void* at) { access<false>(at, bytes, __builtin_return_address(0)); } \
  void __tsan_volatile_write##bytes(void* at) { access<true>(at, bytes, __builtin_return_address(0)); }

extern "C" {
CUDA_ON_CPU_ACCESS(1)
CUDA_ON_CPU_ACCESS(2)
CUDA_ON_CPU_ACCESS(4)
CUDA_ON_CPU_ACCESS(8)
CUDA_ON_CPU_ACCESS(16)
void __tsan_read_range(void* at, size_t bytes) { access<false>(at, bytes, __builtin_return_address(0)); }
void __tsan_write_range(void* at, size_t bytes) { access<true>(at, bytes, __builtin_return_address(0)); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_init() {}
// Memory of the host: a static object asks whether it has been made.
unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int order) { return __atomic_load_n(at, order); }
}
#endif

}  // namespace cuda_on_cpu
