// Codes of fewer bits for values that travel between ranks or rest in memory, in a table of its own beside
// kernels/table.h, whose rules hold here, too: signs, and integers of 4 and 8 bits in blocks that share a scale. All
// devices and instruction sets give the same bytes: fp32 sums, products and quotients are rounded one by one (none is
// fused), and sums of squares have the order of kernels/sum_order.h.
#pragma once
#include "kernels/host_device.h"
#include "kernels/launch.h"

namespace ds::kernels {

// [Note: signs]
// The bit of an element is 1 where it is at least 0 (0 and -0 are plus). Bit i of a run is in byte i / 8, where 128 is
// the first one (the order of numpy.packbits); unused bits of the last byte are 0. A decoded element is scale or
// -scale. Errors are what was to be sent less what a receiver decodes.

// The sum of squares of values + error is added to *sum.
struct ErrorSum {
  const float* values;
  const float* error;  // null: none
  size_t numel;
  double* sum;
};

// bits: of x = values + error; error = x -+ *scale.
struct SignRun {
  const float* values;
  float* error;  // null: none, and none is kept
  size_t numel;
  uint8_t* bits;
  const float* scale;
};

// out = (the sum over parts of +-scale, from the first part on) * factor. Part number i has its bits at
// bits + i * stride, and its scale `i * stride` bytes behind `scale`: a stride keeps the alignment of scales.
struct SignSum {
  float* out;
  size_t numel;
  const uint8_t* bits;
  const float* scale;
  size_t parts, stride;
};

// [Note: blocks]
// `group` elements in a row share a scale (the last group of a run may be shorter). Symmetric: the scale is the
// largest absolute value / (2^(bits-1) - 1), the code is the whole number nearest to x / scale (ties to even), in two's
// complement, and a decoded element is code * scale. With an offset: the offset is the smallest value, rounded down,
// the scale is (largest - offset) / (2^bits - 1), the code is the unsigned number nearest to (x - offset) / scale, and
// a decoded element is code * scale + offset. Scales are rounded up to their type, so that the largest element is not
// clipped, and a decoded element is off by half a scale at most. A group with a NaN, an infinity or a range that fp32
// cannot hold has a NaN for a scale (and offset), codes of 0 and comes back as NaN; its errors stay what they were. A
// group of equal zeros has scale 0. Two codes of 4 bits share a byte, the first one in
// its low half; the unused half of the last byte is 0.
struct BlockCode {
  int bits;      // 4 or 8
  size_t group;  // even for 4 bits
  DType scale;   // of scales and offsets: kBF16 or kF32
  bool offset;
};

// The code in which values travel between ranks.
constexpr BlockCode travelling_blocks(int bits) { return {bits, 256, DType::kBF16, false}; }

constexpr size_t block_groups(const BlockCode& code, size_t numel) { return (numel + code.group - 1) / code.group; }
constexpr size_t code_bytes(const BlockCode& code, size_t numel) { return (numel * code.bits + 7) / 8; }
constexpr size_t scale_bytes(const BlockCode& code, size_t numel) {
  return block_groups(code, numel) * (code.scale == DType::kBF16 ? 2 : 4);
}

struct BlockRun {
  const void* values;
  size_t numel;
  uint8_t* codes;  // code_bytes()
  void* scales;    // block_groups() of them
  void* offsets;   // as many; null without
  // Null, or fp32 and as long as the values: x = values + error is coded, and error becomes
  // beta * error + (1 - beta) * (x - decoded x).
  float* error;
  float beta;
};

// out = the sum over parts of decoded elements * factor, in fp32 and from the first part on, or out += that where
// `add`. The codes, scales and offsets of part number i are i * stride bytes behind those of the first one.
struct BlockSum {
  void* out;
  size_t numel;
  const uint8_t* codes;
  const void* scales;
  const void* offsets;
  size_t parts, stride;
};

// [Note: fake quantization]
// Each element becomes the nearest of 2^bits numbers of its group (`group` elements in a row, the last may be shorter),
// and stays where it is. Symmetric: the step is (2 * largest absolute value + 1e-5) / 2^bits, the number of an element
// is x / step, rounded and kept between -2^(bits-1) and 2^(bits-1) - 1. With an offset: the step is (largest - smallest
// + 1e-5) / 2^bits, the number is (x - smallest) / step between 0 and 2^bits - 1. Rounding is to the nearest (ties to
// even), or up with the probability of the fraction, by random_bits() of [Note: random rounding] and the number of the
// element. A group with a NaN or an infinity comes back as NaN. Source: DeepSpeed's published formulas (MoQ).
struct FakeQuant {
  int bits;  // 1 to 8
  size_t group;
  bool offset, stochastic;
  uint64_t seed;
};

// [Note: small floats]
// A sign, `exponent` bits and `mantissa` bits: e2m1, e3m2, e4m3 or e4m7 (4, 6, 8, 12 bits), with subnormal numbers and
// without infinities and NaNs, so that all codes are numbers. `group` elements in a row have a row of bytes: their
// codes, one after the other from the lowest bit of the first byte on, and then a scale in fp32: largest absolute value
// / largest number of the format (1 for a group of zeros). An element is its number times the scale. Rounding is to the
// nearest (ties to even), or up with the probability of the fraction, by random_bits() of the element's number. A group
// with a NaN or an infinity has a NaN for a scale, and comes back as NaN.
struct FloatCode {
  int exponent, mantissa;
  size_t group;  // codes of whole bytes: a multiple of 2 for 4 and 12 bits, of 4 for 6 bits
  bool stochastic;
  uint64_t seed;
};
DS_HOST_DEVICE constexpr int float_bits(const FloatCode& code) { return 1 + code.exponent + code.mantissa; }
DS_HOST_DEVICE constexpr size_t float_row(const FloatCode& code) {
  return code.group * static_cast<size_t>(float_bits(code)) / 8 + sizeof(float);
}

struct CodeKernels {
  uint32_t abi, size;

  void (*sum_squares_with_error)(const Launch&, const ErrorSum* runs, size_t count);
  void (*encode_signs)(const Launch&, const SignRun* runs, size_t count);
  void (*decode_signs)(const Launch&, const SignSum* runs, size_t count, float factor);
  // `values`, `out`: kF32, kF16 or kBF16. Few launches, however many runs there are.
  void (*encode_blocks)(const Launch&, const BlockCode& code, DType values, const BlockRun* runs, size_t count);
  void (*decode_blocks)(const Launch&, const BlockCode& code, DType out, const BlockSum* runs, size_t count,
                        float factor, bool add);
  // `dtype`: kF32, kF16 or kBF16.
  void (*fake_quant)(const Launch&, const FakeQuant& how, DType dtype, void* values, size_t numel);
  // rows: float_row() bytes for each group. `values`, `out`: kF32, kF16 or kBF16.
  void (*encode_floats)(const Launch&, const FloatCode& code, DType dtype, const void* values, size_t groups,
                        uint8_t* rows);
  void (*decode_floats)(const Launch&, const FloatCode& code, const uint8_t* rows, size_t groups, DType dtype,
                        void* out);
};  // append only

constexpr uint32_t kCodesAbi = 3;

}  // namespace ds::kernels

extern "C" {
// As ds_kernels() and its family in kernels/table.h.
__attribute__((visibility("default"))) const ds::kernels::CodeKernels* ds_code_kernels(uint32_t abi,
                                                                                       const char* device);
__attribute__((visibility("default"))) const ds::kernels::CodeKernels* ds_cpu_code_kernels_isa(uint32_t abi,
                                                                                               const char* isa);
__attribute__((visibility("default"))) const ds::kernels::CodeKernels* ds_device_code_kernels(uint32_t abi);
}
