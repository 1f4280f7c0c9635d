// Sums of magnitudes down the columns of a matrix, as plainly as it can be said.
#include <cmath>

#include "kernels/ref/element.h"
#include "kernels/ref/ref.h"

namespace ds::kernels::ref {

void column_sums(const Launch&, const void* data, DType dtype, size_t n, size_t first, size_t columns, double* sums) {
  for (size_t i = 0; i < n; ++i) sums[(first + i) % columns] += std::fabs(load(data, dtype, i));
}

}  // namespace ds::kernels::ref
