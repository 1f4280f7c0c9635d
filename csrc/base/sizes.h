// Products and sums of sizes that come from a caller or from a file, checked: nothing wraps around.
#pragma once
#include "base/error.h"

namespace ds::sizes {

// False where the type cannot hold the result; `out` is of no use then.
template <typename T>
bool multiply(T a, T b, T* out) {
  return !__builtin_mul_overflow(a, b, out);
}
template <typename T>
bool add(T a, T b, T* out) {
  return !__builtin_add_overflow(a, b, out);
}

// The result, or ErrorKind::kValue that begins with `what`.
template <typename T>
T product(const char* what, T a, T b) {
  T out{};
  if (!multiply(a, b, &out)) fail(ErrorKind::kValue, what, ": ", a, " x ", b, " is more than an integer here can hold");
  return out;
}
template <typename T, typename... More>
T product(const char* what, T a, T b, More... more) {
  return product(what, product(what, a, b), static_cast<T>(more)...);
}
template <typename T>
T sum(const char* what, T a, T b) {
  T out{};
  if (!add(a, b, &out)) fail(ErrorKind::kValue, what, ": ", a, " + ", b, " is more than an integer here can hold");
  return out;
}

// `value`, or the next multiple above it.
template <typename T>
T rounded_up(const char* what, T value, T multiple) {
  const T missing = value % multiple == 0 ? T{0} : multiple - value % multiple;
  return sum(what, value, missing);
}

}  // namespace ds::sizes
