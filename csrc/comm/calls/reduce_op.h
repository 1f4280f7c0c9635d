// The element-wise operations of reductions.
#pragma once

namespace ds::comm {

enum class ReduceOp { kSum, kAvg, kProduct, kMin, kMax, kAnd, kOr, kXor };

const char* reduce_op_name(ReduceOp op);  // sum

}  // namespace ds::comm
