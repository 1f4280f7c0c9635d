// Chooses the cases of large C++ matrices that `make test` runs; `make test-all` runs all. Python: tests/sampling.py.
// Included as "../every_case.h" by the tests of any room.
#pragma once
#include <array>
#include <cstdlib>
#include <initializer_list>
#include <set>
#include <string>

namespace ds {

// `make test-all` sets DS_TEST_EVERY_CASE: then every case is to run, not a sample.
inline bool every_case() {
  const char* asked = std::getenv("DS_TEST_EVERY_CASE");
  return asked && std::string(asked) != "" && std::string(asked) != "0";
}

// The number of random cases that a test tries: what `variable` says, else `all` in `make test-all` and `some` in `make
// test`.
inline int cases_of(const char* variable, int all, int some) {
  const char* asked = std::getenv(variable);
  return asked ? std::atoi(asked) : every_case() ? all : some;
}

// Chooses inside the loops over a matrix: a case is new if two of its values have not met in an earlier one. So each
// pair of values is in some chosen case. Values are numbers (of a list, a type, a size) in the order of the loops.
class NewPairs {
 public:
  bool operator()(std::initializer_list<long long> values) {
    bool found = every_case();
    int second = 0;
    for (auto later = values.begin(); later != values.end(); ++later, ++second) {
      int first = 0;
      for (auto earlier = values.begin(); earlier != later; ++earlier, ++first)
        found |= met_.insert({first, *earlier, second, *later}).second;
    }
    return found;
  }

 private:
  std::set<std::array<long long, 4>> met_;
};

}  // namespace ds
