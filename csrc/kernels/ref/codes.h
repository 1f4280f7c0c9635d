// The plain loops of kernels/codes.h.
#pragma once
#include "kernels/codes.h"

namespace ds::kernels::ref {

void sum_squares_with_error(const Launch&, const ErrorSum* runs, size_t count);
void encode_signs(const Launch&, const SignRun* runs, size_t count);
void decode_signs(const Launch&, const SignSum* runs, size_t count, float factor);
void encode_blocks(const Launch&, const BlockCode& code, DType values, const BlockRun* runs, size_t count);
void decode_blocks(const Launch&, const BlockCode& code, DType out, const BlockSum* runs, size_t count, float factor,
                   bool add);
void fake_quant(const Launch&, const FakeQuant& how, DType dtype, void* values, size_t numel);
void encode_floats(const Launch&, const FloatCode& code, DType dtype, const void* values, size_t groups, uint8_t* rows);
void decode_floats(const Launch&, const FloatCode& code, const uint8_t* rows, size_t groups, DType dtype, void* out);

}  // namespace ds::kernels::ref
