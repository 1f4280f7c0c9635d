// The arithmetic of a library that stands in for NCCL: elements as doubles, ranks in order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace fake_nccl {

enum Op { kSum, kProd, kMax, kMin, kAvg };

inline size_t bytes_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}
inline const char* type_name(int type) {
  static const char* const names[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
                                      "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return names[type];
}

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Enough for tests: normal numbers and zero, rounded to nearest by cutting half a unit.
struct Half {
  uint16_t bits;
  operator double() const {
    const uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    return rest == 0 ? bits_to_float(sign) : bits_to_float(sign | ((rest << 13) + (112u << 23)));
  }
  static Half from(double v) {
    const uint32_t f = float_to_bits(static_cast<float>(v));
    const uint32_t rest = f & 0x7fffffffu;
    const uint32_t rounded = rest < (113u << 23) ? 0 : (rest - (112u << 23) + 0x1000u) >> 13;
    return {static_cast<uint16_t>((f >> 16 & 0x8000u) | rounded)};
  }
};
struct Brain {
  uint16_t bits;
  operator double() const { return bits_to_float(static_cast<uint32_t>(bits) << 16); }
  static Brain from(double v) {
    return {static_cast<uint16_t>((float_to_bits(static_cast<float>(v)) + 0x8000u) >> 16)};
  }
};
template <typename T>
T from_double(double v) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Brain>)
    return T::from(v);
  else
    return static_cast<T>(v);
}

using Inputs = std::vector<std::vector<char>>;  // of each rank

template <typename T>
void reduce_as(const Inputs& inputs, size_t begin, size_t count, int op, char* out) {
  for (size_t i = 0; i < count; ++i) {
    double total = 0;
    for (size_t r = 0; r < inputs.size(); ++r) {
      T element;
      std::memcpy(&element, inputs[r].data() + (begin + i) * sizeof(T), sizeof(T));
      const double v = static_cast<double>(element);
      if (r == 0)
        total = v;
      else if (op == kSum || op == kAvg)
        total += v;
      else if (op == kProd)
        total *= v;
      else
        total = (op == kMax) == (v > total) ? v : total;
    }
    const T result = from_double<T>(op == kAvg ? total / static_cast<double>(inputs.size()) : total);
    std::memcpy(out + i * sizeof(T), &result, sizeof(T));
  }
}

// False: a type whose arithmetic needs hardware.
inline bool reduce(int type, const Inputs& inputs, size_t begin, size_t count, int op, char* out) {
  switch (type) {
    case 0: reduce_as<int8_t>(inputs, begin, count, op, out); return true;
    case 1: reduce_as<uint8_t>(inputs, begin, count, op, out); return true;
    case 2: reduce_as<int32_t>(inputs, begin, count, op, out); return true;
    case 3: reduce_as<uint32_t>(inputs, begin, count, op, out); return true;
    case 4: reduce_as<int64_t>(inputs, begin, count, op, out); return true;
    case 5: reduce_as<uint64_t>(inputs, begin, count, op, out); return true;
    case 6: reduce_as<Half>(inputs, begin, count, op, out); return true;
    case 7: reduce_as<float>(inputs, begin, count, op, out); return true;
    case 8: reduce_as<double>(inputs, begin, count, op, out); return true;
    case 9: reduce_as<Brain>(inputs, begin, count, op, out); return true;
    default: return false;
  }
}

}  // namespace fake_nccl
