// Opens the kernel libraries of other devices, which lie beside this one.
#include <dlfcn.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "kernels/attention.h"
#include "kernels/codes.h"
#include "kernels/layer_ops.h"
#include "kernels/routes.h"
#include "kernels/table.h"

namespace ds::kernels {
namespace {

struct Loaded {
  const KernelTable* (*get)(uint32_t) = nullptr;
  const RouteKernels* (*routes)(uint32_t) = nullptr;
  const AttentionKernels* (*attention)(uint32_t) = nullptr;
  const CodeKernels* (*codes)(uint32_t) = nullptr;
  const LayerKernels* (*layers)(uint32_t) = nullptr;
  bool present = false;  // in its place, or named by the environment
  std::string error, other_abi;

  explicit Loaded(const std::string& device) {
    std::string variable = "DS_" + device + "_KERNELS", path;
    for (char& letter : variable) letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
    if (const char* forced = std::getenv(variable.c_str()); forced != nullptr && *forced != '\0') {
      path = forced;
      present = true;
    } else {
      Dl_info self;
      if (dladdr(reinterpret_cast<const void*>(&ds_kernels), &self) != 0 && self.dli_fname != nullptr)
        path = self.dli_fname;
      path = path.substr(0, path.rfind('/') + 1) + "libds_kernels_" + device + ".so";
      present = access(path.c_str(), F_OK) == 0;
    }
    other_abi = path +
                " was built from another version of the kernel table than its caller: build both again from one source "
                "tree (`make`), or reinstall the package.";
    // Never closed: its kernels stay registered with the driver, and tables point into it.
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      error = "the kernels of '" + device + "' cannot be loaded: " + dlerror() +
              ". Those of CUDA devices are built where nvcc is found: install the CUDA toolkit and build again with "
              "`make`. " +
              variable + " names the file of a library that lies elsewhere.";
      return;
    }
    get = reinterpret_cast<const KernelTable* (*)(uint32_t)>(dlsym(library, "ds_device_kernels"));
    routes = reinterpret_cast<const RouteKernels* (*)(uint32_t)>(dlsym(library, "ds_device_route_kernels"));
    attention = reinterpret_cast<const AttentionKernels* (*)(uint32_t)>(dlsym(library, "ds_device_attention_kernels"));
    codes = reinterpret_cast<const CodeKernels* (*)(uint32_t)>(dlsym(library, "ds_device_code_kernels"));
    layers = reinterpret_cast<const LayerKernels* (*)(uint32_t)>(dlsym(library, "ds_device_layer_kernels"));
    if (get == nullptr) error = path + " is not a kernel library: it has no ds_device_kernels.";
  }
};

bool is_cpu(const char* device) { return std::strcmp(device, "cpu") == 0; }

// The library of a device other than the CPU, which is looked for at the first call.
const Loaded& loaded(const char* device) {
  static std::mutex mutex;
  static std::map<std::string, Loaded> all;
  const std::lock_guard lock(mutex);
  return all.try_emplace(device, device).first->second;
}

// On the CPU, those of the instruction set that was chosen for the kernel table.
template <typename Table>
const Table* find_table(uint32_t abi, const char* device, const Table* (*of_cpu)(uint32_t, const char*),
                        const Table* (*Loaded::*of_device)(uint32_t)) {
  if (is_cpu(device)) {
    const KernelTable* chosen = ds_cpu_kernels(kKernelAbi);
    return chosen != nullptr ? of_cpu(abi, chosen->isa) : nullptr;
  }
  const auto get = loaded(device).*of_device;
  return get != nullptr ? get(abi) : nullptr;
}

}  // namespace
}  // namespace ds::kernels

using namespace ds::kernels;

const KernelTable* ds_kernels(uint32_t abi, const char* device) {
  if (is_cpu(device)) return ds_cpu_kernels(abi);
  const auto get = loaded(device).get;
  return get != nullptr ? get(abi) : nullptr;
}

bool ds_has_kernels(const char* device) { return is_cpu(device) || loaded(device).present; }

const RouteKernels* ds_route_kernels(uint32_t abi, const char* device) {
  return find_table(abi, device, &ds_cpu_route_kernels_isa, &Loaded::routes);
}

const AttentionKernels* ds_attention_kernels(uint32_t abi, const char* device) {
  return find_table(abi, device, &ds_cpu_attention_kernels_isa, &Loaded::attention);
}

const CodeKernels* ds_code_kernels(uint32_t abi, const char* device) {
  return find_table(abi, device, &ds_cpu_code_kernels_isa, &Loaded::codes);
}

const LayerKernels* ds_layer_kernels(uint32_t abi, const char* device) {
  return find_table(abi, device, &ds_cpu_layer_kernels_isa, &Loaded::layers);
}

const char* ds_kernels_error(uint32_t abi, const char* device) {
  if (is_cpu(device)) return ds_cpu_kernels_error(abi);
  const Loaded& library = loaded(device);
  if (library.get == nullptr) return library.error.c_str();
  return library.get(abi) != nullptr ? nullptr : library.other_abi.c_str();
}
