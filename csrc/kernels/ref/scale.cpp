// data *= factor, as plainly as it can be said.
#include "kernels/ref/element.h"
#include "kernels/ref/ref.h"

namespace ds::kernels::ref {

void scale(const Launch&, void* data, DType dtype, size_t n, float factor) {
  for (size_t i = 0; i < n; ++i) {
    if (dtype == DType::kF64) {
      store(data, dtype, i, load(data, dtype, i) * factor);
    } else {
      store(data, dtype, i, static_cast<float>(load(data, dtype, i)) * factor);  // rounded to fp32 here
    }
  }
}

}  // namespace ds::kernels::ref
