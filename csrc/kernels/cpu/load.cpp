// Opens the kernel library of another device, which lies beside this one.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels/attention.h"
#include "kernels/routes.h"
#include "kernels/table.h"

namespace ds::kernels {
namespace {

struct Loaded {
  const KernelTable* (*get)(uint32_t) = nullptr;
  const RouteKernels* (*routes)(uint32_t) = nullptr;
  const AttentionKernels* (*attention)(uint32_t) = nullptr;
  std::string error;

  Loaded() {
    std::string path;
    if (const char* forced = std::getenv("DS_CUDA_KERNELS"); forced != nullptr && *forced != '\0') {
      path = forced;
    } else {
      Dl_info self;
      if (dladdr(reinterpret_cast<const void*>(&ds_kernels), &self) != 0 && self.dli_fname != nullptr)
        path = self.dli_fname;
      path = path.substr(0, path.rfind('/') + 1) + "libds_kernels_cuda.so";
    }
    // Never closed: its kernels stay registered with the driver, and tables point into it.
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      error = std::string("the CUDA kernels cannot be loaded: ") + dlerror() +
              ". They are built where nvcc is found: install the CUDA toolkit and build again with `make`.";
      return;
    }
    get = reinterpret_cast<const KernelTable* (*)(uint32_t)>(dlsym(library, "ds_cuda_kernels"));
    routes = reinterpret_cast<const RouteKernels* (*)(uint32_t)>(dlsym(library, "ds_cuda_route_kernels"));
    attention = reinterpret_cast<const AttentionKernels* (*)(uint32_t)>(dlsym(library, "ds_cuda_attention_kernels"));
    if (get == nullptr) error = path + " is no kernel library: it has no ds_cuda_kernels.";
  }
};

const Loaded& cuda() {
  static const Loaded loaded;
  return loaded;
}

// On the CPU, those of the instruction set that was chosen for the kernel table.
template <typename Table>
const Table* find_table(uint32_t abi, const char* device, const Table* (*of_cpu)(uint32_t, const char*),
                        const Table* (*Loaded::*of_cuda)(uint32_t)) {
  if (std::strcmp(device, "cpu") == 0) {
    const KernelTable* chosen = ds_cpu_kernels(kKernelAbi);
    return chosen != nullptr ? of_cpu(abi, chosen->isa) : nullptr;
  }
  if (std::strcmp(device, "cuda") != 0 || cuda().*of_cuda == nullptr) return nullptr;
  return (cuda().*of_cuda)(abi);
}

}  // namespace
}  // namespace ds::kernels

using namespace ds::kernels;

const KernelTable* ds_kernels(uint32_t abi, const char* device) {
  if (std::strcmp(device, "cpu") == 0) return ds_cpu_kernels(abi);
  if (std::strcmp(device, "cuda") != 0) return nullptr;
  return cuda().get != nullptr ? cuda().get(abi) : nullptr;
}

const RouteKernels* ds_route_kernels(uint32_t abi, const char* device) {
  return find_table(abi, device, &ds_cpu_route_kernels_isa, &Loaded::routes);
}

const AttentionKernels* ds_attention_kernels(uint32_t abi, const char* device) {
  return find_table(abi, device, &ds_cpu_attention_kernels_isa, &Loaded::attention);
}

const char* ds_kernels_error(uint32_t abi, const char* device) {
  if (std::strcmp(device, "cpu") == 0) return ds_cpu_kernels_error(abi);
  if (std::strcmp(device, "cuda") != 0) return "there are kernels for the devices cpu and cuda only.";
  if (cuda().get == nullptr) return cuda().error.c_str();
  if (cuda().get(abi) != nullptr) return nullptr;
  return "libds_kernels_cuda.so was built from another version of the kernel table than its caller: build both again "
         "from one source tree (`make`), or reinstall the package.";
}
