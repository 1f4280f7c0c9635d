// Small floats (kernels/codes.h) on the CPU. Integer arithmetic on one element at a time, which compilers vectorise.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/half.h"
#include "kernels/cpu/codes.h"
#include "kernels/cpu/split.h"
#include "kernels/small_float.h"

namespace ds::kernels::cpu {

namespace {

float wide(float x) { return x; }
float wide(Fp16 x) { return to_float(x); }
float wide(Bf16 x) { return to_float(x); }
void put(float& to, float x) { to = x; }
void put(Fp16& to, float x) { to = to_fp16(x); }
void put(Bf16& to, float x) { to = to_bf16(x); }

// call(value of the type) for the type of `dtype`.
template <typename Call>
void with_small_type(DType dtype, const Call& call) {
  if (dtype == DType::kF32) return call(float{});
  dtype == DType::kF16 ? call(Fp16{}) : call(Bf16{});
}

template <typename Body>
void by_groups(const Launch& launch, const FloatCode& code, size_t groups, const Body& body) {
  if (groups == 0) return;
  if (launch.pool == nullptr || groups * code.group <= kInline) return body(size_t{0}, groups);
  launch.pool->parallel_for(groups, std::max<size_t>(1, kGrain / code.group), body);
}

template <typename T>
void encode_groups(const FloatCode& code, const T* values, uint8_t* rows, size_t begin, size_t end) {
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

template <typename T>
void decode_groups(const FloatCode& code, const uint8_t* rows, T* out, size_t begin, size_t end) {
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
  by_groups(launch, code, groups, [&](size_t begin, size_t end) {
    with_small_type(
        dtype, [&](auto type) { encode_groups(code, static_cast<const decltype(type)*>(values), rows, begin, end); });
  });
}

void decode_floats(const Launch& launch, const FloatCode& code, const uint8_t* rows, size_t groups, DType dtype,
                   void* out) {
  by_groups(launch, code, groups, [&](size_t begin, size_t end) {
    with_small_type(dtype,
                    [&](auto type) { decode_groups(code, rows, static_cast<decltype(type)*>(out), begin, end); });
  });
}

}  // namespace ds::kernels::cpu
