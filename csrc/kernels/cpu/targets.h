// The targets of Highway that are built, and how their bodies become entries of a table. Include it before
// hwy/foreach_target.h. [Note: dispatch] tells the whole story; cpu/scale.cpp shows it.
//
// [Note: dispatch]
// A file of this folder is compiled once per instruction set: foreach_target.h includes it again and again, each time
// with another HWY_NAMESPACE (N_SSE4, N_AVX2...) and the matching target pragma. Only its *range bodies* live in that
// namespace: plain functions over [begin, end) that include nothing but base headers. Anything else (std::vector,
// the pool) stays outside, because an inline function compiled twice with different flags is merged by the linker,
// and then crashes on somebody else's processor. Highway picks targets at compile time only: libhwy.so is not linked,
// the choice at run time is ours (base/cpu_features.h).
#pragma once
#include "base/cpu_features.h"

// Left out: halfway steps between the four sets that a table exists for, and scalable vectors, whose types cannot
// stand in arrays. (Targets that only later versions of Highway know are built there, and not used.)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)

namespace ds::kernels::cpu {

// One range body per instruction set, in the order of ds::Isa; null where this build has none.
template <typename Body>
struct Bodies {
  Body by_isa[kIsaCount];
};
template <typename Body>
constexpr Bodies<Body> make_bodies(Body scalar, Body neon, Body sse4, Body avx2, Body avx512) {
  return {{scalar, neon, sse4, avx2, avx512}};
}

}  // namespace ds::kernels::cpu

// All bodies of `function`, of which every HWY_NAMESPACE has one. For use under HWY_ONCE.
#define DS_BODIES(function)                                                                                           \
  ::ds::kernels::cpu::make_bodies<decltype(&HWY_STATIC_DISPATCH(function))>(                                          \
      HWY_CHOOSE_FALLBACK(function), HWY_CHOOSE_NEON(function), HWY_CHOOSE_SSE4(function), HWY_CHOOSE_AVX2(function), \
      HWY_CHOOSE_AVX3(function))

// The one of them for an instruction set; null where this build has none.
#define DS_BODY(function, isa) (DS_BODIES(function).by_isa[static_cast<int>(isa)])

// The entries of `function<Isa>`, a template over the instruction set, in the order of ds::Isa.
#define DS_ENTRIES(function)                                                                      \
  {                                                                                               \
    &function<Isa::kScalar>, &function<Isa::kNeon>, &function<Isa::kSse4>, &function<Isa::kAvx2>, \
        &function<Isa::kAvx512>                                                                   \
  }
