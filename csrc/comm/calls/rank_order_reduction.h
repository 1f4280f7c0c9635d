// Element-wise reduction over the rows that ranks contributed, in rank order: the same bits whoever computes it.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstddef>

#include "comm/calls/reduce_op.h"

namespace ds::comm {

// out[i] = rows[0][i] op rows[1][i] ... op rows[count - 1][i]. 16-bit floats are widened, reduced in fp32 and rounded
// once. `out` may be one of the rows. `wide`: out is fp32 although the rows are 16-bit floats. Min and max hand a nan
// on. An average of integers is truncated towards zero. Bools: sum and max are "or", product and min are "and".
// Fails for an op that the dtype does not have.
void reduce_in_rank_order(void* out, const void* const* rows, int count, size_t n, c10::ScalarType type, ReduceOp op,
                          bool wide = false);

}  // namespace ds::comm
