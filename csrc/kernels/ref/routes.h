// The plain loops of kernels/routes.h.
#pragma once
#include "kernels/routes.h"

namespace ds::kernels::ref {

void topk_gate(const Launch&, const float* logits, const float* select, size_t tokens, size_t experts, size_t k,
               float* probs, int32_t* index);
void permute_rows(const Launch&, void* out, const void* src, DType dtype, size_t width, size_t rows,
                  const int32_t* index, const float* weight, int64_t divisor);
void combine_rows(const Launch&, void* out, const void* src, DType dtype, size_t width, size_t tokens, size_t k,
                  const int32_t* slot, const float* weight);
void dot_rows(const Launch&, float* out, const void* src, const void* grad, DType dtype, size_t width, size_t tokens,
              size_t k, const int32_t* slot);
void grouped_gemm(const Launch&, const GemmGroup* groups, size_t count, GemmForm form, DType dtype);

}  // namespace ds::kernels::ref
