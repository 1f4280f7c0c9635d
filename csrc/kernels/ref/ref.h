// The plain loops: slow, on one thread, obviously right. Every other body, on any device, must give the same bits (NaN
// payloads aside). Contracts: kernels/table.h.
#pragma once
#include "kernels/table.h"

namespace ds::kernels::ref {

void find_nonfinite(const Launch&, const Checked* arrays, size_t count, DType dtype);
void move_all(const Launch&, const Move* moves, size_t count, DType to, DType from, float scale, bool add);
void copy(const Launch&, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, float scale);
void accumulate(const Launch&, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, float scale);
void sum_squares(const Launch&, const Segment* segments, size_t count, DType dtype, double* sum);
void finish_norm(const Launch&, const double* sum, const double* failed, float loss_scale, float max_norm, bool check,
                 StepScale* out);
void scale(const Launch&, void* data, DType dtype, size_t n, float factor);
void column_sums(const Launch&, const void* data, DType dtype, size_t n, size_t first, size_t columns, double* sums);

}  // namespace ds::kernels::ref
