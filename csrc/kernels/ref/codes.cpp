// Plain loops of signs and of blocks of integers.
#include "kernels/ref/codes.h"

#include <algorithm>
#include <cmath>

#include "kernels/block_scale.h"
#include "kernels/fake_quant.h"
#include "kernels/ref/element.h"
#include "kernels/sum_order.h"

namespace ds::kernels::ref {
namespace {

float load_float(const void* data, DType dtype, size_t i) { return static_cast<float>(load(data, dtype, i)); }

float with_error(float value, const float* error, size_t i) { return error != nullptr ? value + error[i] : value; }

// The code of an element; a group with scale 0 has equal elements.
int code_of(float x, GroupScale group) {
  if (!(group.scale > 0)) return 0;
  return static_cast<int>(std::nearbyint((x - group.offset) / group.scale));
}

float decoded(const BlockCode& code, int number, GroupScale group) {
  const float product = static_cast<float>(number) * group.scale;
  return code.offset ? product + group.offset : product;
}

void store_code(const BlockCode& code, uint8_t* codes, size_t i, int number) {
  if (code.bits == 8) {
    codes[i] = static_cast<uint8_t>(number);
  } else if (i % 2 == 0) {
    codes[i / 2] = static_cast<uint8_t>(number & 15);
  } else {
    codes[i / 2] = static_cast<uint8_t>(codes[i / 2] | (number & 15) << 4);
  }
}

int load_code(const BlockCode& code, const uint8_t* codes, size_t i) {
  const int raw = code.bits == 8 ? codes[i] : codes[i / 2] >> (i % 2 * 4) & 15;
  const int half = 1 << (code.bits - 1);
  return !code.offset && raw >= half ? raw - 2 * half : raw;
}

GroupScale scale_of_group(const BlockCode& code, DType dtype, const BlockRun& run, size_t begin, size_t end) {
  float least = INFINITY, most = -INFINITY;
  for (size_t i = begin; i < end; ++i) {
    const float x = with_error(load_float(run.values, dtype, i), run.error, i);
    if (!std::isfinite(x)) return broken_scale(code);
    least = std::min(least, x);
    most = std::max(most, x);
  }
  return code.offset ? offset_scale(code, least, most)
                     : symmetric_scale(code, std::max(std::fabs(least), std::fabs(most)));
}

}  // namespace

// [Note: order of the sum of squares] in kernels/sum_order.h, followed to the letter.
void sum_squares_with_error(const Launch&, const ErrorSum* runs, size_t count) {
  for (const ErrorSum* run = runs; run != runs + count; ++run) {
    double block_lanes[kSumBlockLanes] = {};
    for (size_t begin = 0, block = 0; begin < run->numel; begin += kSumBlock, ++block) {
      const size_t end = std::min(run->numel, begin + kSumBlock);
      double lanes[kSumLanes] = {};
      for (size_t i = begin; i < end; ++i) {
        const double x = with_error(run->values[i], run->error, i);
        lanes[(i - begin) % kSumLanes] += x * x;
      }
      block_lanes[block % kSumBlockLanes] += sum_of_lanes(lanes);
    }
    *run->sum += sum_of_lanes(block_lanes);
  }
}

void encode_signs(const Launch&, const SignRun* runs, size_t count) {
  for (const SignRun* run = runs; run != runs + count; ++run) {
    for (size_t i = 0; i < run->numel; ++i) {
      const float x = with_error(run->values[i], run->error, i);
      const bool plus = x >= 0;
      if (i % 8 == 0) run->bits[i / 8] = 0;
      if (plus) run->bits[i / 8] = static_cast<uint8_t>(run->bits[i / 8] | 128 >> i % 8);
      if (run->error != nullptr) run->error[i] = plus ? x - *run->scale : x + *run->scale;
    }
  }
}

void decode_signs(const Launch&, const SignSum* runs, size_t count, float factor) {
  for (const SignSum* run = runs; run != runs + count; ++run) {
    for (size_t i = 0; i < run->numel; ++i) {
      float sum = 0;
      for (size_t part = 0; part < run->parts; ++part) {
        const float scale =
            *reinterpret_cast<const float*>(reinterpret_cast<const char*>(run->scale) + part * run->stride);
        const bool plus = (run->bits[part * run->stride + i / 8] & 128 >> i % 8) != 0;
        const float x = plus ? scale : -scale;
        sum = part == 0 ? x : sum + x;
      }
      run->out[i] = sum * factor;
    }
  }
}

void encode_blocks(const Launch&, const BlockCode& code, DType values, const BlockRun* runs, size_t count) {
  for (const BlockRun* run = runs; run != runs + count; ++run) {
    const float rest = 1.0f - run->beta;
    for (size_t begin = 0, group = 0; begin < run->numel; begin += code.group, ++group) {
      const size_t end = std::min(run->numel, begin + code.group);
      const GroupScale scale = scale_of_group(code, values, *run, begin, end);
      store_group(code, run->scales, run->offsets, group, scale);
      for (size_t i = begin; i < end; ++i) {
        const float x = with_error(load_float(run->values, values, i), run->error, i);
        const int number = code_of(x, scale);
        store_code(code, run->codes, i, number);
        if (run->error == nullptr || std::isnan(scale.scale)) continue;
        const float kept = run->beta * run->error[i], lost = rest * (x - decoded(code, number, scale));
        run->error[i] = kept + lost;
      }
    }
  }
}

void decode_blocks(const Launch&, const BlockCode& code, DType out, const BlockSum* runs, size_t count, float factor,
                   bool add) {
  for (const BlockSum* run = runs; run != runs + count; ++run) {
    for (size_t i = 0; i < run->numel; ++i) {
      float sum = 0;
      for (size_t part = 0; part < run->parts; ++part) {
        const size_t behind = part * run->stride;
        const auto at = [&](const void* data) {
          return data != nullptr ? static_cast<const char*>(data) + behind : nullptr;
        };
        const GroupScale group = load_group(code, at(run->scales), at(run->offsets), i / code.group);
        const float x = decoded(code, load_code(code, run->codes + behind, i), group);
        sum = part == 0 ? x : sum + x;
      }
      sum = sum * factor;
      store(run->out, out, i, add ? load_float(run->out, out, i) + sum : sum);
    }
  }
}

void fake_quant(const Launch&, const FakeQuant& how, DType dtype, void* values, size_t numel) {
  const RandomKey key = random_key(how.seed, 0, 0);
  for (size_t begin = 0; begin < numel; begin += how.group) {
    const size_t end = std::min(numel, begin + how.group);
    ValueRange range = no_values();
    for (size_t i = begin; i < end; ++i) range = with_value(range, load_float(values, dtype, i));
    const FakeSteps steps = fake_steps(how, range);
    for (size_t i = begin; i < end; ++i)
      store(values, dtype, i, fake_value(how, steps, key, load_float(values, dtype, i), static_cast<uint32_t>(i)));
  }
}

}  // namespace ds::kernels::ref
