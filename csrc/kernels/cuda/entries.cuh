// The CUDA entries of the kernel table, and what they share on the host side.
#pragma once
#include "kernels/cuda/launch.cuh"
#include "kernels/table.h"

namespace ds::kernels::cuda {

constexpr int kThreads = 256;

// Blocks for a loop over n elements in which every thread takes several turns: enough to fill any GPU.
inline unsigned blocks_for(size_t n, size_t per_thread) {
  const size_t per_block = kThreads * per_thread;
  const size_t blocks = (n + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 8192 ? blocks : 8192);
}

void copy(const Launch&, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, float scale);
void accumulate(const Launch&, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, float scale);
void find_nonfinite(const Launch&, const Checked* arrays, size_t count, DType dtype);
void move_all(const Launch&, const Move* moves, size_t count, DType to, DType from, float scale, bool add);
void sum_squares(const Launch&, const Segment* segments, size_t count, DType dtype, double* sum);
void finish_norm(const Launch&, const double* sum, const double* failed, float loss_scale, float max_norm, bool check,
                 StepScale* out);
void scale(const Launch&, void* data, DType dtype, size_t n, float factor);
void column_sums(const Launch&, const void* data, DType dtype, size_t n, size_t first, size_t columns, double* sums);

}  // namespace ds::kernels::cuda
