// Sums of magnitudes down the columns of a matrix on a GPU: a thread for each column, so that neighbours read
// neighbouring elements and every column is added up from its first row on.
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/entries.cuh"

namespace ds::kernels::cuda {
namespace {

__global__ void column_sums_kernel(const void* data, DType dtype, size_t n, size_t first, size_t columns,
                                   double* sums) {
  const size_t threads = gridDim.x * size_t{blockDim.x};
  for (size_t column = blockIdx.x * size_t{blockDim.x} + threadIdx.x; column < columns; column += threads) {
    double sum = sums[column];
    for (size_t i = column >= first ? column - first : column + columns - first; i < n; i += columns) {
      double x[1];
      load(data, dtype, i, x);
      sum += fabs(x[0]);
    }
    sums[column] = sum;
  }
}

}  // namespace

void column_sums(const Launch& launch, const void* data, DType dtype, size_t n, size_t first, size_t columns,
                 double* sums) {
  if (n == 0) return;  // a launch of no blocks is an error
  launch_kernel(launch, &column_sums_kernel, blocks_for(columns, 1), kThreads, 0, data, dtype, n, first, columns, sums);
}

}  // namespace ds::kernels::cuda
