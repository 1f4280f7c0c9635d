#include "kernels/ref/update.h"

#include <cstring>

#include "kernels/random_rounding.h"
#include "kernels/ref/element.h"

namespace ds::kernels::ref {
void store_rounded(void* data, DType dtype, size_t i, float value, const UpdateArgs& args, uint64_t stream,
                   uint32_t array) {
  if (!args.stochastic || dtype != DType::kBF16) return store(data, dtype, i, value);
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t rounded = random_bf16(bits, random_key(args.seed, stream, array), static_cast<uint32_t>(i));
  std::memcpy(static_cast<uint16_t*>(data) + i, &rounded, 2);
}

std::vector<UpdateRule>& update_rules() {
  static std::vector<UpdateRule> rules;
  return rules;
}

void update(const Launch&, const UpdateKernel& kernel, const UpdateSegment* segments, size_t count,
            const UpdateArgs& args, const StepScale* scale) {
  if (scale != nullptr && scale->skip) return;
  const float grad_scale = scale != nullptr ? scale->grad_scale : 1.0f;
  const UpdateRule* rule = nullptr;
  for (const UpdateRule& one : update_rules())
    if (std::strcmp(one.name, kernel.name) == 0) rule = &one;
  if (rule->pass != nullptr) return rule->pass(segments, count, args, grad_scale);
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg) {
    for (size_t i = 0; i < seg->numel; ++i) {
      float p = static_cast<float>(load(seg->master, args.master_dtype, i));
      float s[kMaxStates] = {};
      for (int k = 0; k < kernel.states; ++k) s[k] = static_cast<float>(load(seg->states[k], args.state_dtype, i));
      rule->step(p, s, static_cast<float>(load(seg->grad, args.grad_dtype, i)) * grad_scale, args.constants);
      store_rounded(seg->master, args.master_dtype, i, p, args, seg->stream, 0);
      for (int k = 0; k < kernel.states; ++k)
        store_rounded(seg->states[k], args.state_dtype, i, s[k], args, seg->stream, 1 + k);
      if (seg->lp != nullptr) store(seg->lp, args.lp_dtype, i, p);
    }
  }
}

}  // namespace ds::kernels::ref
