// Instruction sets that this processor (and its operating system) can run, and the choice of one.
#pragma once
#include <string>
#include <vector>

namespace ds {

// From plain to wide; a body for one of these may use everything its row in cpu_features.cpp names.
enum class Isa { kScalar = 0, kNeon, kSse4, kAvx2, kAvx512 };
constexpr int kIsaCount = 5;

const char* isa_name(Isa isa);  // "scalar", "neon", "sse4", "avx2", "avx512"

// True where code built for `isa` runs on this processor.
bool cpu_has(Isa isa);

// The widest of `built` that this processor has. `forced` (the value of DS_FORCE_ISA; null or empty: not forced)
// names one instead. Throws ErrorKind::kValue when `forced` names none of `built`, or one this processor lacks; the
// message lists the valid names.
Isa select_isa(const std::vector<Isa>& built, const char* forced);

}  // namespace ds
