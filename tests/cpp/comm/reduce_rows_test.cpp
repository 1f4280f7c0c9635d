// reduce_rows against the same reduction written with ATen, one element type and operation at a time.
#include "comm/reduce_rows.h"

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

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, RowOp op) {
  switch (op) {
    case RowOp::kSum:
    case RowOp::kAvg: return a + b;
    case RowOp::kProduct: return a * b;
    case RowOp::kMin: return at::minimum(a, b);
    case RowOp::kMax: return at::maximum(a, b);
    case RowOp::kAnd: return at::bitwise_and(a, b);
    case RowOp::kOr: return at::bitwise_or(a, b);
    case RowOp::kXor: return at::bitwise_xor(a, b);
  }
  return {};
}

TEST(ReduceRows, EqualsPlainArithmetic) {
  const std::vector<RowOp> ops = {RowOp::kSum, RowOp::kAvg, RowOp::kProduct, RowOp::kMin,
                                  RowOp::kMax, RowOp::kAnd, RowOp::kOr,      RowOp::kXor};
  for (auto type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    const bool floating = at::isFloatingType(type), narrow = type == at::kHalf || type == at::kBFloat16;
    for (RowOp op : ops) {
      if (floating && (op == RowOp::kAnd || op == RowOp::kOr || op == RowOp::kXor)) continue;
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
          if (op == RowOp::kAvg) expected = floating ? expected / count : at::div(expected, count, "trunc");
          const at::Tensor found = at::empty_like(tensors[0]);
          reduce_rows(found.data_ptr(), rows.data(), count, numel, type, op);
          ASSERT_TRUE(at::equal(found, expected.to(type)))
              << c10::toString(type) << " " << row_op_name(op) << " of " << count << " rows of " << numel;
          // In place, on the last row.
          reduce_rows(tensors.back().data_ptr(), rows.data(), count, numel, type, op);
          ASSERT_TRUE(at::equal(tensors.back(), found)) << "in place";
        }
      }
    }
  }
}

TEST(ReduceRows, SixteenBitsMayComeOutWide) {
  const at::Tensor a = row(100, 0, at::kBFloat16), b = row(100, 1, at::kBFloat16), out = at::empty({100});
  const void* rows[] = {a.data_ptr(), b.data_ptr()};
  reduce_rows(out.data_ptr(), rows, 2, 100, at::kBFloat16, RowOp::kSum, true);
  EXPECT_TRUE(at::equal(out, a.to(at::kFloat) + b.to(at::kFloat)));
}

TEST(ReduceRows, BoolsAndNans) {
  const at::Tensor a = row(64, 0, at::kBool), b = row(64, 1, at::kBool), out = at::empty_like(a);
  const void* rows[] = {a.data_ptr(), b.data_ptr()};
  reduce_rows(out.data_ptr(), rows, 2, 64, at::kBool, RowOp::kSum);
  EXPECT_TRUE(at::equal(out, at::logical_or(a, b)));
  reduce_rows(out.data_ptr(), rows, 2, 64, at::kBool, RowOp::kMin);
  EXPECT_TRUE(at::equal(out, at::logical_and(a, b)));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (RowOp op : {RowOp::kMin, RowOp::kMax}) {
    const float x[] = {nan, 1.0f}, y[] = {1.0f, nan};
    float z[2];
    const void* both[] = {x, y};
    reduce_rows(z, both, 2, 2, at::kFloat, op);
    EXPECT_TRUE(z[0] != z[0] && z[1] != z[1]) << row_op_name(op);
  }
  EXPECT_THROW(reduce_rows(out.data_ptr(), rows, 2, 64, at::kBool, RowOp::kAvg), Error);
}

}  // namespace
}  // namespace ds::comm
