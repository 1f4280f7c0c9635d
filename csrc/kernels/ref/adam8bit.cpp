// Adam on 8-bit states ([Note: 8-bit states]): block by block decoded, updated by the reference's Adam, encoded.
#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/adam.h"
#include "kernels/code_book.h"
#include "kernels/ref/element.h"
#include "kernels/ref/update.h"

namespace ds::kernels::ref {
namespace {

constexpr CodeBook kSigned = make_code_book(true), kUnsigned = make_code_book(false);

// The maximum of absolute values, NaN where one is NaN; the codes.
void encode_block(const CodeBook& book, const float* x, size_t n, unsigned char* codes, float* max) {
  float most = 0;
  for (size_t i = 0; i < n; ++i)
    if (!(std::abs(x[i]) <= most)) most = std::isnan(most) ? most : std::abs(x[i]);
  for (size_t i = 0; i < n; ++i) codes[i] = code_of(book, most > 0 && std::isfinite(most) ? x[i] / most : 0.0f);
  *max = most;
}

void adam8bit(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float grad_scale) {
  UpdateStep adam = nullptr;
  for (const UpdateRule& rule : update_rules())
    if (rule.name == std::string("adam")) adam = rule.step;
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg) {
    auto* const* codes = reinterpret_cast<unsigned char* const*>(seg->states);
    for (size_t begin = 0; begin < seg->numel; begin += kCodeBlock) {
      const size_t n = std::min(kCodeBlock, seg->numel - begin);
      float m[kCodeBlock], v[kCodeBlock];
      float* first_max = static_cast<float*>(seg->states[2]) + begin / kCodeBlock;
      float* second_max = static_cast<float*>(seg->states[3]) + begin / kCodeBlock;
      for (size_t i = 0; i < n; ++i) {
        float s[] = {kSigned.values[codes[0][begin + i]] * *first_max,
                     kUnsigned.values[codes[1][begin + i]] * *second_max};
        float p = static_cast<float>(load(seg->master, args.master_dtype, begin + i));
        const float g = static_cast<float>(load(seg->grad, args.grad_dtype, begin + i)) * grad_scale;
        adam(p, s, g, args.constants);
        store(seg->master, args.master_dtype, begin + i, p);
        if (seg->lp != nullptr) store(seg->lp, args.lp_dtype, begin + i, p);
        m[i] = s[0];
        v[i] = s[1];
      }
      encode_block(kSigned, m, n, codes[0] + begin, first_max);
      encode_block(kUnsigned, v, n, codes[1] + begin, second_max);
    }
  }
}

const Registration registration("adam8bit", &adam8bit);

}  // namespace
}  // namespace ds::kernels::ref
