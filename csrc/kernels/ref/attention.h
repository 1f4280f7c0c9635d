// The plain loops of kernels/attention.h.
#pragma once
#include "kernels/attention.h"

namespace ds::kernels::ref {

void attention_forward(const Launch&, const AttentionShape&, const AttentionOperand& query, const AttentionOperand& key,
                       const AttentionOperand& value, const AttentionState&, bool fresh);
void attention_merge(const Launch&, const AttentionState& into, const AttentionState& from, DType wide, size_t rows,
                     size_t value_size);
void attention_backward(const Launch&, const AttentionShape&, const AttentionOperand& query,
                        const AttentionOperand& key, const AttentionOperand& value, const AttentionOperand& grad,
                        const void* lse, const void* row_sum, void* for_query, void* for_key, void* for_value);
void attention_bias_backward(const Launch&, const AttentionShape&, const AttentionOperand& query,
                             const AttentionOperand& key, const AttentionOperand& value, const AttentionOperand& grad,
                             const void* lse, const void* row_sum, int which, void* for_bias);

}  // namespace ds::kernels::ref
