#include "base/cpu_features.h"

#include <gtest/gtest.h>

#include "../error_of.h"
#include "base/error.h"

namespace ds {
namespace {

const std::vector<Isa> kAll = {Isa::kScalar, Isa::kNeon, Isa::kSse4, Isa::kAvx2, Isa::kAvx512};

TEST(SelectIsa, TakesTheWidestThatIsBuiltAndPresent) {
  const Isa best = select_isa(kAll, nullptr);
  EXPECT_TRUE(cpu_has(best));
  for (Isa isa : kAll) {
    if (cpu_has(isa)) {
      EXPECT_LE(static_cast<int>(isa), static_cast<int>(best));
    }
  }
  EXPECT_EQ(select_isa({Isa::kScalar}, nullptr), Isa::kScalar);
  EXPECT_EQ(select_isa(kAll, ""), best);
}

TEST(SelectIsa, AForcedNameWins) {
  for (Isa isa : kAll) {
    if (cpu_has(isa)) {
      EXPECT_EQ(select_isa(kAll, isa_name(isa)), isa);
    }
  }
}

std::string refusal(const std::vector<Isa>& built, const char* forced) {
  return error_of(ErrorKind::kValue, [&] { select_isa(built, forced); });
}

TEST(SelectIsa, AnUnknownNameIsAnErrorThatListsTheValidOnes) {
  const std::string text = refusal(kAll, "avx1024");
  EXPECT_TRUE(says(text, "DS_FORCE_ISA=avx1024 is not an instruction set"));
  for (Isa isa : kAll) EXPECT_EQ(text.find(isa_name(isa)) != std::string::npos, cpu_has(isa)) << text;
}

TEST(SelectIsa, ANameThatIsNotBuiltIsAnErrorThatListsTheValidOnes) {
  const std::string text = refusal({Isa::kScalar}, "avx512");
  EXPECT_TRUE(says(text, "lacks avx512. Valid here: scalar;"));
}

}  // namespace
}  // namespace ds
