#include "kernels/table.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "base/cpu_features.h"
#include "base/error.h"
#include "kernels/ref/ref.h"

namespace ds::kernels {
namespace {

const char* no_error() { return nullptr; }

constexpr KernelTable kRef = {kKernelAbi,          sizeof(KernelTable), "cpu",       "ref",     &ref::copy, &ref::accumulate,
                              &ref::sum_squares, &ref::finish_norm,   &ref::adam, &ref::scale, &no_error,  &no_error};

}  // namespace
}  // namespace ds::kernels

using namespace ds::kernels;

const KernelTable* ds_cpu_kernels(uint32_t abi) { return abi == kKernelAbi ? &kRef : nullptr; }
