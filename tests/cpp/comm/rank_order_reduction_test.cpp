// reduce_in_rank_order against the same reduction written with ATen, one element type and operation at a time.
#include "comm/calls/rank_order_reduction.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <limits>

#include "base/error.h"

namespace ds::comm {
namespace {

at::Tensor row(int64_t numel, int rank, at::ScalarType type) {
  const at::Tensor ramp = at::arange(numel, at::kFloat) * 0.37f + static_cast<float>(rank);
  const at::Tensor values = at::sin(ramp) * 20.0f;
  return type == at::kBool ? values > 0 : values.to(type);
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: return a + b;
    case ReduceOp::kProduct: return a * b;
    case ReduceOp::kMin: return at::minimum(a, b);
    case ReduceOp::kMax: return at::maximum(a, b);
    case ReduceOp::kAnd: return at::bitwise_and(a, b);
    case ReduceOp::kOr: return at::bitwise_or(a, b);
    case ReduceOp::kXor: return at::bitwise_xor(a, b);
  }
  return {};
}

TEST(ReduceRows, EqualsPlainArithmetic) {
  const std::vector<ReduceOp> ops = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin,
                                     ReduceOp::kMax, ReduceOp::kAnd, ReduceOp::kOr,      ReduceOp::kXor};
  for (auto type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    const bool floating = at::isFloatingType(type), narrow = type == at::kHalf || type == at::kBFloat16;
    for (ReduceOp op : ops) {
      if (floating && (op == ReduceOp::kAnd || op == ReduceOp::kOr || op == ReduceOp::kXor)) continue;
      for (int count : {1, 2, 3, 8}) {
        for (int64_t numel : {0, 1, 17, 1024, 2051}) {
          std::vector<at::Tensor> tensors;
          std::vector<const void*> rows;
          for (int rank = 0; rank < count; ++rank) {
            tensors.push_back(row(numel, rank, type));
            rows.push_back(tensors.back().data_ptr());
          }
          at::Tensor expected = narrow ? tensors[0].to(at::kFloat) : tensors[0].clone();
          for (int rank = 1; rank < count; ++rank)
            expected = combine(expected, tensors[rank].to(expected.scalar_type()), op);
          if (op == ReduceOp::kAvg) expected = floating ? expected / count : at::div(expected, count, "trunc");
          const at::Tensor found = at::empty_like(tensors[0]);
          reduce_in_rank_order(found.data_ptr(), rows.data(), count, numel, type, op);
          ASSERT_TRUE(at::equal(found, expected.to(type)))
              << c10::toString(type) << " " << reduce_op_name(op) << " of " << count << " rows of " << numel;
          // In place, on the last row.
          reduce_in_rank_order(tensors.back().data_ptr(), rows.data(), count, numel, type, op);
          ASSERT_TRUE(at::equal(tensors.back(), found)) << "in place";
        }
      }
    }
  }
}

TEST(ReduceRows, SixteenBitsMayComeOutWide) {
  const at::Tensor a = row(100, 0, at::kBFloat16), b = row(100, 1, at::kBFloat16), out = at::empty({100});
  const void* rows[] = {a.data_ptr(), b.data_ptr()};
  reduce_in_rank_order(out.data_ptr(), rows, 2, 100, at::kBFloat16, ReduceOp::kSum, true);
  EXPECT_TRUE(at::equal(out, a.to(at::kFloat) + b.to(at::kFloat)));
}

TEST(ReduceRows, BoolsAndNans) {
  const at::Tensor a = row(64, 0, at::kBool), b = row(64, 1, at::kBool), out = at::empty_like(a);
  const void* rows[] = {a.data_ptr(), b.data_ptr()};
  reduce_in_rank_order(out.data_ptr(), rows, 2, 64, at::kBool, ReduceOp::kSum);
  EXPECT_TRUE(at::equal(out, at::logical_or(a, b)));
  reduce_in_rank_order(out.data_ptr(), rows, 2, 64, at::kBool, ReduceOp::kMin);
  EXPECT_TRUE(at::equal(out, at::logical_and(a, b)));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const float x[] = {nan, 1.0f}, y[] = {1.0f, nan};
    float z[2];
    const void* both[] = {x, y};
    reduce_in_rank_order(z, both, 2, 2, at::kFloat, op);
    EXPECT_TRUE(z[0] != z[0] && z[1] != z[1]) << reduce_op_name(op);
  }
  EXPECT_THROW(reduce_in_rank_order(out.data_ptr(), rows, 2, 64, at::kBool, ReduceOp::kAvg), Error);
}

}  // namespace
}  // namespace ds::comm
