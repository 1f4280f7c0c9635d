#include "base/cpu_features.h"

#include "base/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ds {
namespace {

constexpr Isa kAll[kIsaCount] = {Isa::kScalar, Isa::kNeon, Isa::kSse4, Isa::kAvx2, Isa::kAvx512};

#if defined(__x86_64__)
bool has_f16c() {  // clang's __builtin_cpu_supports does not know the name
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
bool has_sse4() {
  return __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("sse4.2") &&
         __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("aes");
}

bool has_avx2() {
  return has_sse4() && __builtin_cpu_supports("avx") && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#endif

std::string names_of(const std::vector<Isa>& isas) {
  std::string text;
  for (Isa isa : isas) text += (text.empty() ? "" : ", ") + std::string(isa_name(isa));
  return text;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return "scalar";
    case Isa::kNeon: return "neon";
    case Isa::kSse4: return "sse4";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
  }
  return "?";
}

bool cpu_has(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return true;
#if defined(__x86_64__)
    case Isa::kNeon: return false;
    case Isa::kSse4: return has_sse4();
    case Isa::kAvx2: return has_avx2();
    case Isa::kAvx512: return has_avx512();
#elif defined(__aarch64__)
    case Isa::kNeon: return true;
    default: return false;
#else
    default: return false;
#endif
  }
  return false;
}

Isa select_isa(const std::vector<Isa>& built, const char* forced) {
  std::vector<Isa> usable;
  for (Isa isa : built)
    if (cpu_has(isa)) usable.push_back(isa);
  if (usable.empty()) fail(ErrorKind::kRuntime, "no kernel body was built that this processor can run");
  if (forced == nullptr || *forced == '\0') {
    Isa best = usable.front();
    for (Isa isa : usable)
      if (isa > best) best = isa;
    return best;
  }
  for (Isa isa : usable)
    if (forced == std::string(isa_name(isa))) return isa;
  for (Isa isa : kAll)
    if (forced == std::string(isa_name(isa)))
      fail(ErrorKind::kValue, "DS_FORCE_ISA=", forced, ": this processor or this build lacks ", forced,
           ". Valid here: ", names_of(usable), "; unset DS_FORCE_ISA to use the best of them.");
  fail(ErrorKind::kValue, "DS_FORCE_ISA=", forced, " is not an instruction set. Valid here: ", names_of(usable),
       "; unset DS_FORCE_ISA to use the best of them.");
}

}  // namespace ds
