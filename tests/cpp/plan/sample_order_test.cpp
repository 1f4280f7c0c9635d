#include "plan/sample_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "../error_of.h"

namespace ds::plan {
namespace {

using Numbers = std::vector<int64_t>;

Numbers drawn(SampleOrder& order, int64_t count) {
  Numbers found(static_cast<size_t>(count));
  order.draw(count, found.data());
  return found;
}

Numbers sorted(Numbers numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

Numbers up_to(int64_t n) {
  Numbers all(static_cast<size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

TEST(KeyedPermutation, MapsEachNumberToAnotherOne) {
  Numbers sizes = up_to(300);
  sizes.erase(sizes.begin());
  sizes.insert(sizes.end(), {1023, 1024, 1025, 65536, 65537, 100000});
  for (const int64_t n : sizes) {
    const KeyedPermutation permutation(77, static_cast<uint64_t>(n));
    Numbers found;
    for (int64_t i = 0; i < n; ++i) found.push_back(static_cast<int64_t>(permutation(static_cast<uint64_t>(i))));
    ASSERT_EQ(sorted(found), up_to(n)) << n;
  }
}

// The place of each number is as likely as any other, and so is the difference of two neighbours: chi-square over keys.
TEST(KeyedPermutation, LooksRandom) {
  constexpr uint64_t n = 23;
  constexpr int keys = 20000;
  std::vector<std::vector<int>> places(n, std::vector<int>(n)), pairs(n, std::vector<int>(n));
  for (uint64_t key = 0; key < keys; ++key) {
    const KeyedPermutation permutation(key, n);
    for (uint64_t i = 0; i < n; ++i) {
      ++places[i][permutation(i)];
      ++pairs[i][(permutation(i) + n - permutation((i + 1) % n)) % n];
    }
  }
  const auto chi_square = [](const std::vector<int>& counts, size_t from, double expected) {
    double sum = 0;
    for (size_t i = from; i < counts.size(); ++i) sum += (counts[i] - expected) * (counts[i] - expected) / expected;
    return sum;
  };
  for (uint64_t i = 0; i < n; ++i) {  // 22 and 21 degrees of freedom: above 60 with a probability of 2e-5
    EXPECT_LT(chi_square(places[i], 0, double{keys} / n), 60) << i;
    EXPECT_LT(chi_square(pairs[i], 1, double{keys} / (n - 1)), 60) << i;
    EXPECT_EQ(pairs[i][0], 0);
  }
}

TEST(SampleOrder, APoolThatDoesNotGrowGivesEachSampleOnceInEachRound) {
  for (const bool last : {false, true}) {
    SampleOrder order(1234);
    order.join({5, 1, 64, 30}, last);
    std::set<Numbers> rounds;
    for (int round = 0; round < 5; ++round) {
      const Numbers found = drawn(order, 100);
      EXPECT_EQ(sorted(found), up_to(100));
      rounds.insert(found);
    }
    EXPECT_EQ(rounds.size(), 5u) << "each round has another order";
  }
}

TEST(SampleOrder, NoSampleOfAClusterComesASecondTimeBeforeAllHaveCome) {
  SampleOrder order(9);
  const Numbers sizes = {40, 7, 200, 1, 33};
  Numbers all;
  for (size_t i = 0; i < sizes.size(); ++i) {
    order.join({sizes[i]}, i + 1 == sizes.size());
    const Numbers more = drawn(order, 57 + 31 * static_cast<int64_t>(i));
    all.insert(all.end(), more.begin(), more.end());
  }
  const Numbers rest = drawn(order, 3000);
  all.insert(all.end(), rest.begin(), rest.end());
  int64_t start = 0;
  for (const int64_t size : sizes) {
    Numbers own;
    for (const int64_t one : all) {
      if (one >= start && one < start + size) own.push_back(one - start);
    }
    for (size_t from = 0; from + static_cast<size_t>(size) <= own.size(); from += static_cast<size_t>(size)) {
      const auto begin = own.begin() + static_cast<std::ptrdiff_t>(from);
      EXPECT_EQ(sorted(Numbers(begin, begin + size)), up_to(size));
    }
    start += size;
  }
}

TEST(SampleOrder, AfterTheLastClusterPassesEndTogether) {
  SampleOrder order(9);
  order.join({50}, false);
  drawn(order, 120);  // 30 are left of the third pass
  order.join({20}, false);
  const int64_t taken = order.state().taken[0];
  (void)drawn(order, 35);
  const auto left = [&](size_t i) { return order.state().weights[i]; };
  order.join({30}, true);
  ASSERT_EQ(order.state().weights.size(), 3u);
  EXPECT_GT(taken, 100);
  EXPECT_EQ(left(0), 50 - order.state().taken[0] % 50);
  EXPECT_EQ(left(2), 30);
  drawn(order, left(0) + left(1) + left(2));
  for (int round = 0; round < 3; ++round) EXPECT_EQ(sorted(drawn(order, 100)), up_to(100));
}

TEST(SampleOrder, DrawsFollowTheSizesOfTheClusters) {
  SampleOrder order(3);
  order.join({100, 900}, false);
  std::map<bool, int> counts;
  for (const int64_t one : drawn(order, 500)) ++counts[one < 100];
  EXPECT_NEAR(counts[true], 50, 30);
}

TEST(SampleOrder, ASavedPositionGoesOn) {
  for (const int64_t at : {0, 1, 49, 63, 100, 333, 1001}) {
    SampleOrder order(5);
    order.join({50}, false);
    drawn(order, 63);
    order.join({13, 20}, true);
    drawn(order, at);
    SampleOrder other = SampleOrder::restored(5, {50, 13, 20}, order.state());
    EXPECT_EQ(drawn(other, 400), drawn(order, 400)) << at;
  }
}

TEST(SampleOrder, WrongUses) {
  SampleOrder order(5);
  EXPECT_TRUE(says(error_of([&] { drawn(order, 1); }), "no cluster has joined"));
  EXPECT_TRUE(says(error_of([&] { order.join({3, 0}, false); }), "a cluster has 0 samples"));
  SampleOrder ended(5);
  ended.join({3}, true);
  EXPECT_TRUE(says(error_of([&] { ended.join({3}, true); }), "clusters cannot join after the last ones"));
  const SampleOrder::State state = ended.state();
  EXPECT_TRUE(says(error_of([&] { SampleOrder::restored(5, {3, 4}, state); }), "does not belong to these 2 clusters"));
  for (int broken = 0; broken < 5; ++broken) {
    SampleOrder::State other = state;
    if (broken == 0) other.taken[0] = -1;
    if (broken == 1) other.joins = 0;
    if (broken == 2) other.weights = {4};
    if (broken == 3) other.drawn = 4;
    if (broken == 4) other.round = 1;
    EXPECT_NE(error_of([&] { SampleOrder::restored(5, {3}, other); }), "no error") << broken;
  }
}

}  // namespace
}  // namespace ds::plan
