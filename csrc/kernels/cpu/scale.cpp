// data *= factor. THE EXEMPLAR: copy this file to write another CPU kernel. [Note: dispatch] in cpu/targets.h says why
// it is built like this. A kernel is
//   kernels/table.h        one entry: its contract
//   kernels/ref/<name>.cpp plain loops, the definition of what is right
//   kernels/cpu/<name>.cpp this: vectors, threads
//   kernels/cuda/<name>.cu the same for a GPU
//   tests/cpp/kernels/<name>_test.cpp, benchmarks/cpp/kernels/<name>_bench.cpp
#include "kernels/cpu/targets.h"

// 1. Compile this file again for each instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/scale.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"

// 2. The range body, in the namespace of the instruction set. It knows vectors, not threads.
HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

template <class T>
void scale_elements(T* data, size_t n, float factor) {
  // d is a full register of fp32, however wide that is here; for the last few elements a single one.
  each_element(n, [&](auto d, size_t i) HWY_ATTR { store(d, Mul(load(d, data + i), Set(d, factor)), data + i); });
}

void scale_range(void* data, DType dtype, size_t begin, size_t end, float factor) {
  if (dtype == DType::kF64) {  // rare enough for a plain loop
    for (size_t i = begin; i < end; ++i) static_cast<double*>(data)[i] *= factor;
    return;
  }
  with_type(dtype, [&](auto type) { scale_elements(static_cast<decltype(type)*>(data) + begin, end - begin, factor); });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

// 3. Once: the table's entry. It knows threads, not vectors.
#if HWY_ONCE
#include "kernels/cpu/entries.h"
#include "kernels/cpu/split.h"

namespace ds::kernels::cpu {
namespace {

template <Isa isa>
void scale(const Launch& launch, void* data, DType dtype, size_t n, float factor) {
  split(launch, n, [=](size_t begin, size_t end) { DS_BODY(scale_range, isa)(data, dtype, begin, end, factor); });
}

}  // namespace

const decltype(KernelTable::scale) kScale[kIsaCount] = DS_ENTRIES(scale);

// Only in this file: what it is built for, all others are.
bool built(Isa isa) { return DS_BODY(scale_range, isa) != nullptr; }

}  // namespace ds::kernels::cpu
#endif
