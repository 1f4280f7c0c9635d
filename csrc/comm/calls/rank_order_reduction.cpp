#include "comm/calls/rank_order_reduction.h"

#include <c10/util/complex.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/error.h"
#include "base/half.h"
#include "kernels/table.h"

namespace ds::comm {

namespace {

// Long enough for the loops to be vectorised, short enough for the first cache.
constexpr size_t kBlock = 1024;

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};
struct Product {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
};
struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return b < a || b != b ? b : a;
  }
};
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return b > a || b != b ? b : a;
  }
};
struct And {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// In steps of a fixed length, which every compiler turns into vectors; `out` may be one of the rows.
template <typename T, typename Op>
void combine(T* out, const T* a, const T* b, size_t n) {
  constexpr size_t kStep = 64 / sizeof(T);
  size_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    T x[kStep], y[kStep];
    std::memcpy(x, a + i, sizeof(x));
    std::memcpy(y, b + i, sizeof(y));
    for (size_t j = 0; j < kStep; ++j) x[j] = Op::template apply<T>(x[j], y[j]);
    std::memcpy(out + i, x, sizeof(x));
  }
  for (; i < n; ++i) out[i] = Op::template apply<T>(a[i], b[i]);
}

template <typename T, typename Op>
void same_type(T* out, const void* const* rows, int count, size_t n, int divisor) {
  if (count == 2 && divisor == 1)  // the usual case, in one pass
    return combine<T, Op>(out, static_cast<const T*>(rows[0]), static_cast<const T*>(rows[1]), n);
  T block[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t m = std::min(kBlock, n - begin);
    std::copy_n(static_cast<const T*>(rows[0]) + begin, m, block);
    for (int r = 1; r < count; ++r) combine<T, Op>(block, block, static_cast<const T*>(rows[r]) + begin, m);
    if (divisor != 1)
      for (size_t i = 0; i < m; ++i) block[i] = block[i] / static_cast<T>(divisor);
    std::copy_n(block, m, out + begin);
  }
}

// Sums go through the kernels of the instruction set in use: widening and rounding is most of their work.
const kernels::KernelTable& cpu_kernels() {
  static const kernels::KernelTable* const table = ds_cpu_kernels(kernels::kKernelAbi);
  if (!table) fail(ErrorKind::kRuntime, ds_cpu_kernels_error(kernels::kKernelAbi));
  return *table;
}

template <typename T, typename Op>
void sixteen_bits(void* out, const void* const* rows, int count, size_t n, int divisor, bool wide) {
  constexpr DType kType = std::is_same_v<T, Bf16> ? DType::kBF16 : DType::kF16;
  const kernels::KernelTable& table = cpu_kernels();
  const kernels::Launch here;
  float block[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t m = std::min(kBlock, n - begin);
    const auto part = [&](int r) { return static_cast<const T*>(rows[r]) + begin; };
    table.copy(here, block, DType::kF32, part(0), kType, m, 1.0f);
    for (int r = 1; r < count; ++r) {
      if constexpr (std::is_same_v<Op, Sum>) {
        table.accumulate(here, block, DType::kF32, part(r), kType, m, 1.0f);
      } else {
        for (size_t i = 0; i < m; ++i) block[i] = Op::template apply<float>(block[i], to_float(part(r)[i]));
      }
    }
    if (divisor != 1)
      for (size_t i = 0; i < m; ++i) block[i] = block[i] / static_cast<float>(divisor);
    if (wide) {
      std::copy_n(block, m, static_cast<float*>(out) + begin);
    } else {
      table.copy(here, static_cast<T*>(out) + begin, kType, block, DType::kF32, m, 1.0f);
    }
  }
}

struct Call {
  void* out;
  const void* const* rows;
  int count;
  size_t n;
  c10::ScalarType type;
  ReduceOp op;
  bool wide;
  int divisor() const { return op == ReduceOp::kAvg ? count : 1; }
};

[[noreturn]] void refuse(const Call& call) {
  fail(ErrorKind::kType, "tensors of ", c10::toString(call.type), " have no ", reduce_op_name(call.op));
}

template <typename T, typename Op>
void run(const Call& call) {
  same_type<T, Op>(static_cast<T*>(call.out), call.rows, call.count, call.n, call.divisor());
}

template <typename T>
void arithmetic(const Call& call) {
  switch (call.op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: return run<T, Sum>(call);
    case ReduceOp::kProduct: return run<T, Product>(call);
    case ReduceOp::kMin: return run<T, Min>(call);
    case ReduceOp::kMax: return run<T, Max>(call);
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (call.op == ReduceOp::kAnd) return run<T, And>(call);
    if (call.op == ReduceOp::kOr) return run<T, Or>(call);
    if (call.op == ReduceOp::kXor) return run<T, Xor>(call);
  }
  refuse(call);
}

template <typename T>
void narrow(const Call& call) {
  switch (call.op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return sixteen_bits<T, Sum>(call.out, call.rows, call.count, call.n, call.divisor(), call.wide);
    case ReduceOp::kProduct: return sixteen_bits<T, Product>(call.out, call.rows, call.count, call.n, 1, call.wide);
    case ReduceOp::kMin: return sixteen_bits<T, Min>(call.out, call.rows, call.count, call.n, 1, call.wide);
    case ReduceOp::kMax: return sixteen_bits<T, Max>(call.out, call.rows, call.count, call.n, 1, call.wide);
    default: refuse(call);
  }
}

void bools(const Call& call) {
  switch (call.op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kOr:
      return run<uint8_t, Or>({call.out, call.rows, call.count, call.n, call.type, ReduceOp::kOr, false});
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kAnd:
      return run<uint8_t, And>({call.out, call.rows, call.count, call.n, call.type, ReduceOp::kAnd, false});
    case ReduceOp::kXor: return run<uint8_t, Xor>(call);
    case ReduceOp::kAvg: refuse(call);
  }
}

// Complex numbers add up as pairs.
template <typename T>
void complex_pairs(Call call) {
  if (call.op != ReduceOp::kSum && call.op != ReduceOp::kAvg) refuse(call);
  call.n *= 2;
  run<T, Sum>(call);
}

}  // namespace

const char* reduce_op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kAvg: return "average";
    case ReduceOp::kProduct: return "product";
    case ReduceOp::kMin: return "minimum";
    case ReduceOp::kMax: return "maximum";
    case ReduceOp::kAnd: return "bitwise and";
    case ReduceOp::kOr: return "bitwise or";
    case ReduceOp::kXor: return "bitwise xor";
  }
  return "?";
}

void reduce_in_rank_order(void* out, const void* const* rows, int count, size_t n, c10::ScalarType type, ReduceOp op,
                          bool wide) {
  const Call call{out, rows, count, n, type, op, wide};
  switch (type) {
    case c10::ScalarType::Float: return arithmetic<float>(call);
    case c10::ScalarType::Double: return arithmetic<double>(call);
    case c10::ScalarType::BFloat16: return narrow<Bf16>(call);
    case c10::ScalarType::Half: return narrow<Fp16>(call);
    case c10::ScalarType::Byte: return arithmetic<uint8_t>(call);
    case c10::ScalarType::Char: return arithmetic<int8_t>(call);
    case c10::ScalarType::Short: return arithmetic<int16_t>(call);
    case c10::ScalarType::Int: return arithmetic<int32_t>(call);
    case c10::ScalarType::Long: return arithmetic<int64_t>(call);
    case c10::ScalarType::Bool: return bools(call);
    case c10::ScalarType::ComplexFloat: return complex_pairs<float>(call);
    case c10::ScalarType::ComplexDouble: return complex_pairs<double>(call);
    default: refuse(call);
  }
}

}  // namespace ds::comm
