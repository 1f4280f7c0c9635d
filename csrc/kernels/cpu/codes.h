// The CPU's entries of the table of codes, one per instruction set in the order of ds::Isa.
#pragma once
#include <vector>

#include "base/cpu_features.h"
#include "kernels/codes.h"
#include "kernels/cpu/split.h"

namespace ds::kernels::cpu {

extern const decltype(CodeKernels::sum_squares_with_error) kSumSquaresWithError[kIsaCount];
extern const decltype(CodeKernels::encode_signs) kEncodeSigns[kIsaCount];
extern const decltype(CodeKernels::decode_signs) kDecodeSigns[kIsaCount];
extern const decltype(CodeKernels::encode_blocks) kEncodeBlocks[kIsaCount];
extern const decltype(CodeKernels::decode_blocks) kDecodeBlocks[kIsaCount];
extern const decltype(CodeKernels::fake_quant) kFakeQuant[kIsaCount];

// The same for every instruction set.
void encode_floats(const Launch&, const FloatCode& code, DType dtype, const void* values, size_t groups, uint8_t* rows);
void decode_floats(const Launch&, const FloatCode& code, const uint8_t* rows, size_t groups, DType dtype, void* out);

// Calls body(s, first, last) for units of `width` elements of every run, of which the last unit may be shorter.
template <typename Run, typename Body>
void split_units(const Launch& launch, const Run* runs, size_t count, size_t width, const Body& body) {
  struct Units {
    size_t numel;
  };
  std::vector<Units> units(count);
  for (size_t s = 0; s < count; ++s) units[s].numel = (runs[s].numel + width - 1) / width;
  split_segments(launch, units.data(), count, body, width);
}

}  // namespace ds::kernels::cpu
