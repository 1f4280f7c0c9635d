// Plain loops of 1-bit Adam and 0/1 Adam.
#include "kernels/onebit.h"

#include "kernels/ref/element.h"
#include "kernels/ref/update.h"

namespace ds::kernels::ref {
namespace {

// One element, and what it exchanges.
struct Element {
  float p, g, x;
  float s[kMaxStates];
};

float root_of(const Element& e, const OneBitConstants& c) { return std::sqrt(e.s[1]) * c.inv_sqrt_correct + c.eps; }

float change_of(const Element& e, const OneBitConstants& c) {
  return c.step_size * e.s[0] / root_of(e, c) + c.decay * e.p;
}

void send(Element& e, const OneBitConstants& c) { e.x = c.gradients ? e.g : e.s[0] + c.move1 * (e.g - e.s[0]); }

void take(Element& e, const OneBitConstants& c) {
  e.s[0] = c.gradients ? e.s[0] + c.move1 * (e.x - e.s[0]) : e.x;
  e.p = e.p - change_of(e, c);
}

void local(Element& e, const OneBitConstants& c) {
  e.s[0] = e.s[0] + c.move1 * (e.g - e.s[0]);
  const float change = change_of(e, c);
  e.p = e.p - change;
  e.s[2] = e.s[2] - change;
}

void local_send(Element& e, const OneBitConstants& c) {
  local(e, c);
  e.x = e.s[2] * root_of(e, c);
}

void sync(Element& e, const OneBitConstants& c) {
  if (c.lr_sum != 0) e.s[0] = -(e.x / c.lr_sum);
  e.p = e.s[3] + e.x / root_of(e, c);
  e.s[3] = e.p;
  e.s[2] = 0;
}

// kStates: those that are read. kWrites: a bit for each one that is written; bit 4: the weight; bit 5: x.
template <auto kStep, int kStates, int kWrites>
void each(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float grad_scale) {
  const auto& c = *static_cast<const OneBitConstants*>(args.constants);
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg) {
    for (size_t i = 0; i < seg->numel; ++i) {
      Element e = {};
      e.p = static_cast<float>(load(seg->master, args.master_dtype, i));
      e.g = static_cast<float>(load(seg->grad, args.grad_dtype, i)) * grad_scale;
      if (seg->scratch != nullptr) e.x = seg->scratch[i];
      for (int k = 0; k < kStates; ++k) e.s[k] = static_cast<float>(load(seg->states[k], args.state_dtype, i));
      kStep(e, c);
      for (int k = 0; k < kStates; ++k)
        if (kWrites >> k & 1) store_rounded(seg->states[k], args.state_dtype, i, e.s[k], args, seg->stream, 1 + k);
      if (kWrites & 32) seg->scratch[i] = e.x;
      if (!(kWrites & 16)) continue;
      store_rounded(seg->master, args.master_dtype, i, e.p, args, seg->stream, 0);
      if (seg->lp != nullptr) store(seg->lp, args.lp_dtype, i, e.p);
    }
  }
}

const Registration send_registration("onebit_send", &each<&send, 1, 32>);
const Registration take_registration("onebit_take", &each<&take, 2, 16 + 1>);
const Registration local_registration("zero_one_local", &each<&local, 3, 16 + 1 + 4>);
const Registration local_send_registration("zero_one_send", &each<&local_send, 3, 32 + 16 + 1 + 4>);
const Registration sync_registration("zero_one_sync", &each<&sync, 4, 16 + 1 + 4 + 8>);

}  // namespace
}  // namespace ds::kernels::ref
