// Small floats (kernels/codes.h) on the CPU. Integer arithmetic on one element at a time, which compilers vectorise.
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cpu/codes.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/split.h"
#include "kernels/small_float.h"

namespace ds::kernels::cpu {

namespace {

// A format whose widths and rounding are constants for the compiler.
template <int kExponent, int kMantissa, bool kStochastic>
struct Format {
  static FloatCode of(FloatCode code) {
    code.exponent = kExponent, code.mantissa = kMantissa, code.stochastic = kStochastic;
    return code;
  }
};
template <bool kStochastic, typename Call>
void with_mantissa(const FloatCode& code, const Call& call) {
  switch (float_bits(code)) {
    case 4: return call(Format<2, 1, kStochastic>());
    case 6: return call(Format<3, 2, kStochastic>());
    case 8: return call(Format<4, 3, kStochastic>());
    default: return call(Format<4, 7, kStochastic>());
  }
}
template <typename Call>
void with_format(const FloatCode& code, const Call& call) {
  code.stochastic ? with_mantissa<true>(code, call) : with_mantissa<false>(code, call);
}

template <typename Form, typename T>
void encode_groups(const FloatCode& given, const T* values, uint8_t* rows, size_t begin, size_t end) {
  const FloatCode code = Form::of(given);
  const RandomKey key = random_key(code.seed, 0, 0);
  const size_t units = code.group / static_cast<size_t>(float_unit(code).codes);
  std::vector<float> group(code.group);
  for (size_t g = begin; g < end; ++g) {
    float most = 0;
    bool odd = false;
    for (size_t i = 0; i < code.group; ++i) {
      group[i] = wide(values[g * code.group + i]);
      const float size = std::fabs(group[i]);
      odd = odd || size != size;
      most = size > most ? size : most;
    }
    const float scale = float_scale(code, odd ? NAN : most);
    uint8_t* row = rows + g * float_row(code);
    for (size_t u = 0; u < units; ++u)
      encode_unit(
          code, scale, key, g * code.group, u, [&](size_t i) { return group[i]; }, row);
    std::memcpy(row + float_row(code) - sizeof(scale), &scale, sizeof(scale));
  }
}

template <typename Form, typename T>
void decode_groups(const FloatCode& given, const uint8_t* rows, T* out, size_t begin, size_t end) {
  const FloatCode code = Form::of(given);
  const size_t units = code.group / static_cast<size_t>(float_unit(code).codes);
  for (size_t g = begin; g < end; ++g) {
    const uint8_t* row = rows + g * float_row(code);
    float scale;
    std::memcpy(&scale, row + float_row(code) - sizeof(scale), sizeof(scale));
    T* to = out + g * code.group;
    for (size_t u = 0; u < units; ++u) decode_unit(code, scale, u, row, [to](size_t i, float x) { put(to[i], x); });
  }
}

}  // namespace

void encode_floats(const Launch& launch, const FloatCode& code, DType dtype, const void* values, size_t groups,
                   uint8_t* rows) {
  split_rows(launch, groups, code.group, [&](size_t begin, size_t end) {
    with_element(dtype, [&](auto type) {
      using T = decltype(type);
      with_format(code, [&](auto form) {
        encode_groups<decltype(form)>(code, static_cast<const T*>(values), rows, begin, end);
      });
    });
  });
}

void decode_floats(const Launch& launch, const FloatCode& code, const uint8_t* rows, size_t groups, DType dtype,
                   void* out) {
  split_rows(launch, groups, code.group, [&](size_t begin, size_t end) {
    with_element(dtype, [&](auto type) {
      using T = decltype(type);
      with_format(code,
                  [&](auto form) { decode_groups<decltype(form)>(code, rows, static_cast<T*>(out), begin, end); });
    });
  });
}

}  // namespace ds::kernels::cpu
