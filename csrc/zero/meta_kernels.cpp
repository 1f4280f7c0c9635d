#include "zero/meta_kernels.h"

#include "storage/meta_memory.h"
#include "zero/any_kernels.h"

namespace ds::zero {
namespace {

using kernels::Launch;

template <typename... Args>
constexpr auto nothing(void (*)(Args...)) {
  return +[](Args...) {};
}

void touched(size_t bytes) {
  if (auto* memory = storage::MetaMemory::installed()) memory->touched(bytes);
}

kernels::KernelTable make_table() {
  kernels::KernelTable made = cpu_library();
  made.device = "meta";
  made.isa = "none";
  made.copy = [](const Launch&, void*, DType to, const void*, DType from, size_t n, float) {
    touched(n * (dtype_bytes(to) + dtype_bytes(from)));
  };
  made.accumulate = [](const Launch&, void*, DType to, const void*, DType from, size_t n, float) {
    touched(n * (2 * dtype_bytes(to) + dtype_bytes(from)));
  };
  made.sum_squares = [](const Launch&, const kernels::Segment* segments, size_t count, DType dtype, double*) {
    for (size_t i = 0; i < count; ++i) touched(segments[i].numel * dtype_bytes(dtype));
  };
  made.finish_norm = nothing(made.finish_norm);
  made.update = nothing(made.update);
  made.scale = nothing(made.scale);
  made.column_sums = nothing(made.column_sums);
  return made;
}

}  // namespace

const kernels::KernelTable& meta_kernels() {
  static const kernels::KernelTable table = make_table();
  return table;
}

}  // namespace ds::zero
