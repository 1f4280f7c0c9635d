#include "comm/nccl/native_stream.h"

#include <dlfcn.h>

#include "base/error.h"

namespace ds::comm {

// CUDA's accessor is a plain member function of libc10_cuda.so, which torch has loaded if it has CUDA.
void* native_stream(c10::Stream stream) {
  if (stream.device_type() != c10::kCUDA) return reinterpret_cast<void*>(stream.id());
  using Accessor = void* (*)(const c10::Stream*);
  static const Accessor accessor = [] {
    void* library = dlopen("libc10_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? reinterpret_cast<Accessor>(dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv")) : nullptr;
  }();
  if (!accessor) fail(ErrorKind::kRuntime, "this torch has no CUDA support");
  return accessor(&stream);
}

}  // namespace ds::comm
