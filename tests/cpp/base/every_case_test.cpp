// The sample of a matrix (every_case.h) has each pair of values.
#include "../every_case.h"

#include <gtest/gtest.h>

#include <vector>

namespace ds {
namespace {

// Sets DS_TEST_EVERY_CASE while it lives; nullptr: it is not there.
class Asked {
 public:
  explicit Asked(const char* value) {
    if (const char* before = std::getenv(kName)) before_ = before;
    set(value);
  }
  ~Asked() { set(before_.empty() ? nullptr : before_.c_str()); }

 private:
  static constexpr const char* kName = "DS_TEST_EVERY_CASE";
  static void set(const char* value) { value ? setenv(kName, value, 1) : unsetenv(kName); }
  std::string before_;
};

using Matrix = std::vector<std::array<long long, 4>>;

Matrix chosen() {
  Matrix found;
  NewPairs sample;
  for (long long a = 0; a < 4; ++a)
    for (long long b = 0; b < 3; ++b)
      for (long long c = 0; c < 3; ++c)
        for (long long d = 0; d < 2; ++d)
          if (sample({a, b, c, d})) found.push_back({a, b, c, d});
  return found;
}

size_t pairs_of(const Matrix& cases) {
  std::set<std::array<long long, 4>> met;
  for (const auto& one : cases)
    for (int later = 0; later < 4; ++later)
      for (int earlier = 0; earlier < later; ++earlier) met.insert({earlier, one[earlier], later, one[later]});
  return met.size();
}

TEST(EveryCase, ASampleHoldsEachPairOfValues) {
  Matrix whole, sample;
  {
    Asked every("1");
    EXPECT_TRUE(every_case());
    whole = chosen();
    EXPECT_EQ(whole.size(), 72u);
    EXPECT_EQ(cases_of("DS_NOT_SET", 7, 3), 7);
  }
  for (const char* value : {static_cast<const char*>(nullptr), "", "0"}) {
    Asked some(value);
    EXPECT_FALSE(every_case());
    sample = chosen();
    EXPECT_LT(sample.size(), 36u);
    EXPECT_EQ(pairs_of(sample), pairs_of(whole));
    EXPECT_EQ(cases_of("DS_NOT_SET", 7, 3), 3);
  }
  setenv("DS_COUNT_OF_THIS_TEST", "5", 1);
  EXPECT_EQ(cases_of("DS_COUNT_OF_THIS_TEST", 7, 3), 5);
  unsetenv("DS_COUNT_OF_THIS_TEST");
}

}  // namespace
}  // namespace ds
