// CUDA kernels on the stand-in: DS_STANDIN_KERNELS names a library of them that runs on the CPU
// (tests/cpp/kernels/cuda_on_cpu), and its launches are queued as kernels. The library says which bytes each has used.
#include <dlfcn.h>

#include <cstdlib>
#include <memory>

#include "../cpp/kernels/cuda_on_cpu/on_cpu.h"
#include "counts.h"
#include "kernels.h"
#include "memory.h"
#include "standin.h"

namespace standin {

namespace {

decltype(&ds_cuda_on_cpu_accesses) accesses_of_work = nullptr;
decltype(&ds_cuda_on_cpu_drop) drop = nullptr;

struct Launched {
  void (*run)(void*);
  void* work;
};

struct Used {
  std::vector<Access> accesses;
  const void* of_host = nullptr;
};

void add(void* used, const void* begin, size_t bytes, bool writes) {
  const auto* at = static_cast<const char*>(begin);
  if (mapping_of(at))
    static_cast<Used*>(used)->accesses.push_back({at, at + bytes, writes});
  else if (writes)  // what is read of the host are also the arguments of the launch
    static_cast<Used*>(used)->of_host = begin;
}

void run_launched(void* launched) {
  const std::unique_ptr<Launched> own(static_cast<Launched*>(launched));
  own->run(own->work);
  Used used;
  accesses_of_work(&add, &used);
  kernel_used(std::move(used.accesses), used.of_host);
}

const char* queue(void* stream, void (*run)(void*), void* work) {
  if (runs_nothing()) {
    count(Count::kKernels);
    drop(work);
    return nullptr;
  }
  auto launched = std::make_unique<Launched>(Launched{run, work});
  const char* error = standin_launch(stream, "of CUDA", &run_launched, launched.get());
  if (!error) launched.release();
  return error;
}

// A library that does not open, or is another one, is no error here: the caller of the kernels reports it.
[[maybe_unused]] const bool connected = [] {
  const char* path = std::getenv("DS_STANDIN_KERNELS");
  void* library = path && *path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!library) return false;
  const auto set_runner =
      reinterpret_cast<decltype(&ds_cuda_on_cpu_set_runner)>(dlsym(library, "ds_cuda_on_cpu_set_runner"));
  accesses_of_work = reinterpret_cast<decltype(&ds_cuda_on_cpu_accesses)>(dlsym(library, "ds_cuda_on_cpu_accesses"));
  drop = reinterpret_cast<decltype(&ds_cuda_on_cpu_drop)>(dlsym(library, "ds_cuda_on_cpu_drop"));
  if (set_runner && accesses_of_work && drop) set_runner(&queue);
  return set_runner != nullptr;
}();

}  // namespace

}  // namespace standin
