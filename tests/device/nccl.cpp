// The library that stands in for NCCL (tests/cpp/comm/fake_nccl), with its operations on the stand-in's streams.
#include <dlfcn.h>

#include "../cpp/comm/fake_nccl/fake_nccl.h"
#include "memory.h"
#include "standin.h"

namespace standin {

namespace {

void queue(void* stream, const fake_nccl::Range* ranges, size_t count, void (*run)(void*), void* operation) {
  std::vector<StandinAccess> accesses;
  for (size_t i = 0; i < count; ++i) accesses.push_back({ranges[i].memory, ranges[i].bytes, ranges[i].written});
  standin_queue(stream, "NCCL", accesses.data(), static_cast<int>(count), run, operation);
}

}  // namespace

}  // namespace standin

extern "C" __attribute__((visibility("default"))) const char* standin_use_nccl(const char* path) {
  static const fake_nccl::DeviceCalls calls = {[] { return standin_device_of(nullptr); }, &standin::queue,
                                               [](void* memory) { return standin_open(memory); }};
  void* library = dlopen(path, RTLD_NOW);
  if (!library) return dlerror();
  const auto use = reinterpret_cast<decltype(&fake_nccl_use_device)>(dlsym(library, "fake_nccl_use_device"));
  if (!use) return dlerror();
  use(&calls);
  return nullptr;
}
