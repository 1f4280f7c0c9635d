// The 8-bit numbers of block-wise quantised optimizer states: dynamic tree quantisation (Dettmers et al. 2022, "8-bit
// Optimizers via Block-wise Quantization", section 2; the unsigned form has its free bit in the fraction).
//
// [Note: 8-bit states] A state of n elements is n codes and one fp32 maximum of absolute values for each block of
// kCodeBlock elements, the last of which may be shorter. Element i is values[code[i]] * max[i / kCodeBlock]. It is
// stored by its quotient y with the maximum, rounded to the nearest number of the book (a rounding error of fp32
// decides ties). In the unsigned book only 0 becomes 0: a second moment of 0 under a first one that is not would be a
// step without bound. A block with a NaN has a NaN for a maximum, one with an infinity an infinity, and codes of 0: all
// of it comes back as NaN.
//
// The numbers above 0 come in eight levels: the decades of 10^-6 to 10^0, each with twice as many evenly spaced numbers
// as the one below, and 1. Numbered in order, with the first of each level at a power of two, their numbers ("ranks")
// are 1, 2-3, 4-7, ..., 128 (unsigned: 2-3, 4-7, ..., 256): the level is the exponent of the rank as a float, the
// number within it its fraction. So both directions are a handful of fp32 operations on one of eight constants, no
// search, and the same bits follow on every device, as long as products and sums are not fused.
#pragma once
#include <cstddef>
#include <initializer_list>

#include "kernels/host_device.h"

namespace ds::kernels {

constexpr size_t kCodeBlock = 256;
constexpr int kCodeLevels = 8;
constexpr int kLevelLanes = 16;  // the constants of the levels are there twice, for vectors of sixteen lanes

constexpr size_t code_blocks(size_t numel) { return (numel + kCodeBlock - 1) / kCodeBlock; }

struct CodeBook {
  float values[256];  // ascending, the last is 1
  int zero;           // the code of 0
  int ranks_below;    // a number above 0 has the code zero + rank - ranks_below
  // For each level: a number of it is offset + slope * (rank / first rank); what is rounded to one is at least `from`
  // and below `until`; its rank is the whole number nearest to |y| * scale + bias, at most `last`.
  alignas(64) float offset[kLevelLanes];
  float slope[kLevelLanes], from[kLevelLanes], until[kLevelLanes];
  float scale[kLevelLanes], bias[kLevelLanes], last[kLevelLanes];
};

constexpr CodeBook make_code_book(bool is_signed) {
  CodeBook book{};
  book.zero = is_signed ? 127 : 0;
  book.ranks_below = is_signed ? 0 : 1;
  double decade = 1e-6, step = 0;
  int first = is_signed ? 1 : 2;
  for (int level = 0; level < kCodeLevels; ++level, decade *= 10, first *= 2) {
    const bool one = level == kCodeLevels - 1;
    const double step_below = step, low = 0.1 * decade;
    step = 0.9 * decade / first;
    book.last[level] = static_cast<float>(2 * first - 1);
    book.slope[level] = one ? 0 : static_cast<float>(0.9 * decade);
    book.offset[level] = one ? 1 : static_cast<float>(low - 0.9 * decade + step / 2);
    // Half-way between the neighbours: the steps of a level are five times those of the one below.
    book.from[level] = static_cast<float>(one ? 1 - step_below / 4 : low + step_below);
    book.scale[level] = one ? 0 : static_cast<float>(1 / step);
    book.bias[level] = static_cast<float>(one ? first : first - low / step - 0.5);
    for (int rank = first; rank < 2 * first; ++rank) {
      const float product = book.slope[level] * (static_cast<float>(rank) / static_cast<float>(first));
      const float value = book.offset[level] + product;
      const int code = book.zero + rank - book.ranks_below;
      if (code < 256) book.values[code] = value;
      if (is_signed && rank <= book.zero) book.values[book.zero - rank] = -value;
    }
    // The first level begins below its lowest step: at half of its first number, or at the smallest number there is.
    if (level == 0) {
      book.from[0] = is_signed ? book.values[128] / 2 : 1.4e-45f;
      book.scale[0] = is_signed ? 0 : static_cast<float>(1 / (low + step));
      book.bias[0] = static_cast<float>(is_signed ? first : first - 0.5);
    }
  }
  for (int level = 0; level < kCodeLevels; ++level)
    book.until[level] = level + 1 < kCodeLevels ? book.from[level + 1] : __builtin_inff();
  for (float* constants : {book.offset, book.slope, book.from, book.until, book.scale, book.bias, book.last})
    for (int level = 0; level < kCodeLevels; ++level) constants[kCodeLevels + level] = constants[level];
  return book;
}

// The code of y, -1 <= y <= 1.
DS_HOST_DEVICE static inline unsigned char code_of(const CodeBook& book, float y) {
  const float size = y < 0 ? -y : y;
  if (size < book.from[0]) return static_cast<unsigned char>(book.zero);
  int level = 0;
  for (int k = 1; k < kCodeLevels; ++k) level += size >= book.from[k];
  float rank = size * book.scale[level];
  rank = rank + book.bias[level];
  if (rank > book.last[level]) rank = book.last[level];
  const int steps = static_cast<int>(__builtin_rintf(rank)) - book.ranks_below;
  const int code = y < 0 ? book.zero - steps : book.zero + steps;
  return static_cast<unsigned char>(code < 0 ? 0 : code);  // -1 is not in the book
}

}  // namespace ds::kernels
