// The 8-bit numbers of block-wise quantised optimizer states: dynamic tree quantisation (Dettmers et al. 2022, "8-bit
// Optimizers via Block-wise Quantization", section 2; the unsigned form has its free bit in the fraction).
//
// [Note: 8-bit states] A state of n elements is n codes and one fp32 maximum of absolute values for each block of
// kCodeBlock elements, the last of which may be shorter. Element i is book[code[i]] * max[i / kCodeBlock]. It is stored
// by its quotient with the maximum, rounded to the nearest number of the book (a tie goes up). In the
// unsigned book only 0 becomes 0: a second moment of 0 under a first one that is not would be a step without bound.
// A block with a NaN has a
// NaN for a maximum, one with an infinity an infinity, and codes of 0: all of it comes back as NaN.
#pragma once
#include <cstddef>

namespace ds::kernels {

constexpr size_t kCodeBlock = 256;

constexpr size_t code_blocks(size_t numel) { return (numel + kCodeBlock - 1) / kCodeBlock; }

struct CodeBook {
  float values[256];     // ascending, the last is 1
  float midpoints[256];  // between neighbours; the last is never reached. The code of y is the number of those <= y.
};

// Decades of 10^-6 to 10^0, each with twice as many evenly spaced numbers as the one below; 0 and 1; with `is_signed`
// negative ones as well, and half as many of each.
constexpr CodeBook make_code_book(bool is_signed) {
  CodeBook book{};
  double positive[254] = {};
  int count = 0;
  double decade = 1e-6;
  for (int i = 0; i < 7; ++i) {
    const int items = is_signed ? 1 << i : 2 << i;
    for (int j = 0; j < items; ++j) positive[count++] = decade * (0.1 + 0.9 * (j + 0.5) / items);
    decade *= 10;
  }
  int at = 0;
  for (int i = count - 1; is_signed && i >= 0; --i) book.values[at++] = static_cast<float>(-positive[i]);
  book.values[at++] = 0;
  for (int i = 0; i < count; ++i) book.values[at++] = static_cast<float>(positive[i]);
  book.values[at++] = 1;
  for (int i = 0; i < 255; ++i) {
    const double low = book.values[i], high = book.values[i + 1];
    book.midpoints[i] = static_cast<float>((low + high) / 2);
  }
  if (!is_signed) book.midpoints[0] = 1.4e-45f;  // the smallest number there is
  book.midpoints[255] = 2;
  return book;
}

}  // namespace ds::kernels
