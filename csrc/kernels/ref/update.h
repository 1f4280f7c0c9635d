// The plain loop around a rule: element by element, widened, updated, rounded back. ref/adam.cpp shows how a rule
// joins.
#pragma once
#include <vector>

#include "kernels/update.h"

namespace ds::kernels::ref {

// One element: `p` and `s` (the rule's states) are updated in place from the gradient `g`; `c` is the rule's block.
using UpdateStep = void (*)(float& p, float* s, float g, const void* c);
// A whole pass, for rules that are more than a loop over elements.
using UpdatePass = void (*)(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float grad_scale);

struct UpdateRule {
  const char* name;
  UpdateStep step;            // or
  UpdatePass pass = nullptr;  // this
};

// Filled while the library is loaded, constant afterwards.
std::vector<UpdateRule>& update_rules();

struct Registration {
  Registration(const char* name, UpdateStep step) { update_rules().push_back({name, step}); }
  Registration(const char* name, UpdatePass pass) { update_rules().push_back({name, nullptr, pass}); }
};

// To nearest, or at random where args.stochastic and bf16; `array` is that of random_key().
void store_rounded(void* data, DType dtype, size_t i, float value, const UpdateArgs& args, uint64_t stream,
                   uint32_t array);

void update(const Launch&, const UpdateKernel& kernel, const UpdateSegment* segments, size_t count,
            const UpdateArgs& args, const StepScale* scale);

}  // namespace ds::kernels::ref
