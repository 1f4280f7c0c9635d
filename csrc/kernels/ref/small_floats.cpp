// The plain loops of small floats: each element is compared with every number of the format, or chosen by a fraction.
#include <cmath>
#include <cstring>

#include "kernels/random_rounding.h"
#include "kernels/ref/codes.h"
#include "kernels/ref/element.h"

namespace ds::kernels::ref {
namespace {

// Number `code`, by the definition of the format.
double number(const FloatCode& f, int code) {
  const int fraction = code % (1 << f.mantissa), exponent = code >> f.mantissa, bias = (1 << (f.exponent - 1)) - 1;
  const double one = fraction / static_cast<double>(1 << f.mantissa);
  return exponent == 0 ? std::ldexp(one, 1 - bias) : std::ldexp(1 + one, exponent - bias);
}

uint32_t encoded(const FloatCode& f, float x, uint32_t random) {
  const int largest = (1 << (f.exponent + f.mantissa)) - 1;
  const double size = std::fabs(static_cast<double>(x));
  int below = 0;
  while (below < largest && number(f, below + 1) <= size) ++below;
  int found = below;
  if (below < largest) {
    const double rest = (size - number(f, below)) / (number(f, below + 1) - number(f, below));
    if (!f.stochastic) {
      found += rest > 0.5 || (rest == 0.5 && below % 2 == 1) ? 1 : 0;
    } else if (below < 1 << f.mantissa) {  // subnormal numbers compare with 24 random bits
      found += (random >> 8) * std::ldexp(1.0, -24) < rest ? 1 : 0;
    } else {  // others add as many bits as are cut off
      const int cut = 23 - f.mantissa;
      found += std::floor(rest * (1 << cut)) + random % (1u << cut) >= (1 << cut) ? 1 : 0;
    }
  }
  return static_cast<uint32_t>(found) | (std::signbit(x) ? 1u << (f.exponent + f.mantissa) : 0);
}

void set_bits(uint8_t* row, size_t at, int bits, uint32_t code) {
  for (int b = 0; b < bits; ++b) {
    uint8_t& byte = row[(at + b) / 8];
    const auto bit = static_cast<uint8_t>(1u << ((at + b) % 8));
    byte = static_cast<uint8_t>((code >> b & 1) != 0 ? byte | bit : byte & ~bit);
  }
}

}  // namespace

void encode_floats(const Launch&, const FloatCode& f, DType dtype, const void* values, size_t groups, uint8_t* rows) {
  const RandomKey key = random_key(f.seed, 0, 0);
  const double largest = number(f, (1 << (f.exponent + f.mantissa)) - 1);
  for (size_t g = 0; g < groups; ++g) {
    double most = 0;
    bool finite = true;
    for (size_t i = 0; i < f.group; ++i) {
      const double size = std::fabs(load(values, dtype, g * f.group + i));
      finite = finite && std::isfinite(size);
      most = size > most ? size : most;
    }
    float scale = static_cast<float>(most) / static_cast<float>(largest);
    if (scale == 0) scale = 1;
    if (!finite) scale = NAN;
    uint8_t* row = rows + g * float_row(f);
    for (size_t i = 0; i < f.group; ++i) {
      const auto x = static_cast<float>(load(values, dtype, g * f.group + i));
      const uint32_t random = random_bits(key, static_cast<uint32_t>(g * f.group + i));
      set_bits(row, i * float_bits(f), float_bits(f), finite ? encoded(f, x / scale, random) : 0);
    }
    std::memcpy(row + float_row(f) - sizeof(scale), &scale, sizeof(scale));
  }
}

void decode_floats(const Launch&, const FloatCode& f, const uint8_t* rows, size_t groups, DType dtype, void* out) {
  const int bits = float_bits(f);
  for (size_t g = 0; g < groups; ++g) {
    const uint8_t* row = rows + g * float_row(f);
    float scale;
    std::memcpy(&scale, row + float_row(f) - sizeof(scale), sizeof(scale));
    for (size_t i = 0; i < f.group; ++i) {
      int code = 0;
      for (int b = 0; b < bits; ++b) code |= (row[(i * bits + b) / 8] >> ((i * bits + b) % 8) & 1) << b;
      const auto size = static_cast<float>(number(f, code % (1 << (bits - 1))));
      store(out, dtype, g * f.group + i, (code >> (bits - 1) != 0 ? -size : size) * scale);
    }
  }
}

}  // namespace ds::kernels::ref
