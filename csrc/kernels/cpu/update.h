// Update kernels on the CPU: a rule gives one range body for each instruction set, the rest is shared. cpu/adam.cpp
// shows how a rule joins.
#pragma once
#include <vector>

#include "kernels/cpu/targets.h"
#include "kernels/cpu/update_range.h"
#include "kernels/update.h"

namespace ds::kernels::cpu {

using UpdateBody = void (*)(const UpdateRange&, const void* constants);
// A whole pass, for rules that are more than a loop over elements. scale is not null and does not say skip.
using UpdatePass = void (*)(const Launch&, Isa, const UpdateSegment*, size_t count, const UpdateArgs&,
                            const StepScale& scale);

struct CpuUpdate : UpdateKernel {
  Bodies<UpdateBody> bodies{};
  UpdatePass pass = nullptr;
};

// Filled while the library is loaded, constant afterwards.
std::vector<CpuUpdate>& updates();

struct UpdateRegistration {
  UpdateRegistration(const char* name, int states, size_t constants_bytes, Bodies<UpdateBody> bodies) {
    updates().push_back({{name, states, constants_bytes}, bodies});
  }
  UpdateRegistration(const char* name, int states, size_t constants_bytes, UpdatePass pass) {
    updates().push_back({{name, states, constants_bytes}, {}, pass});
  }
};

const UpdateKernel* find_update(const char* name);
const char* update_name(size_t index);  // null behind the last

// Elements [begin, end) of a segment by `body`, in place where everything is fp32 (but gradient and lp), else through
// buffers. scratch and sums are handed on.
void update_range(Isa isa, const UpdateSegment& segment, size_t begin, size_t end, const UpdateArgs& args, int states,
                  float grad_scale, UpdateBody body);

}  // namespace ds::kernels::cpu

// At namespace scope under HWY_ONCE: registers the element-wise rule `name` with the body `function` of every
// HWY_NAMESPACE and the constants `Constants`.
#define DS_CPU_UPDATE(name, states, Constants, function)                                                    \
  static const ::ds::kernels::cpu::UpdateRegistration ds_update_##function(name, states, sizeof(Constants), \
                                                                           DS_BODIES(function))
