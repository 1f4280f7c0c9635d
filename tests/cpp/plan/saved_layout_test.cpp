#include "plan/saved_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <tuple>

#include "../error_of.h"
#include "base/error.h"

namespace ds::plan {
namespace {

// Element e of parameter p is found at (rank, unit, element of the unit's tensor).
using Home = std::tuple<int32_t, int32_t, int64_t>;

std::map<Home, int64_t> homes(const SavedLayout& layout, const std::vector<int64_t>& numels) {
  std::map<Home, int64_t> found;
  int64_t element = 0;
  for (size_t param = 0; param < numels.size(); ++param) {
    int64_t next = 0;
    for (const SavedRun& run : layout.runs(param)) {
      EXPECT_EQ(run.param_offset, next);
      EXPECT_GT(run.numel, 0);
      for (int64_t i = 0; i < run.numel; ++i) {
        EXPECT_TRUE(found.emplace(Home(run.rank, layout.unit(param), run.begin + i), element + next + i).second);
      }
      next += run.numel;
    }
    EXPECT_EQ(next, numels[param]);
    element += numels[param];
  }
  return found;
}

TEST(SavedLayout, FlatPartitionsAreRowsOfAGroup) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    const int32_t ranks = 1 + static_cast<int32_t>(random() % 5);
    std::vector<std::vector<int64_t>> groups(1 + random() % 3);
    std::vector<int64_t> numels, sizes, totals;
    for (auto& group : groups) {
      int64_t total = 0;
      for (size_t i = random() % 6; i > 0; --i) {
        group.push_back(static_cast<int64_t>(random() % 20));
        numels.push_back(group.back());
        total += group.back();
      }
      sizes.push_back((total + ranks - 1) / ranks + static_cast<int64_t>(random() % 3));
      totals.push_back(total);
    }
    const SavedLayout layout = SavedLayout::flat(groups, sizes, ranks, "here");
    const std::map<Home, int64_t> found = homes(layout, numels);
    int64_t element = 0;
    for (size_t group = 0; group < groups.size(); ++group) {
      for (int64_t at = 0; at < totals[group]; ++at, ++element) {
        const Home home(static_cast<int32_t>(at / sizes[group]), static_cast<int32_t>(group), at % sizes[group]);
        ASSERT_EQ(found.at(home), element);
      }
    }
  }
}

TEST(SavedLayout, SlicesStandEndToEndInTheUnitsOfEachRank) {
  std::mt19937 random(2);
  for (int round = 0; round < 500; ++round) {
    const int32_t ranks = 1 + static_cast<int32_t>(random() % 5);
    std::vector<int64_t> numels, units(1, 0);
    std::vector<size_t> unit_of;
    for (size_t i = random() % 8; i > 0; --i) {
      numels.push_back(static_cast<int64_t>(random() % 20));
      if (units.back() > 0 && random() % 3 == 0) units.push_back(0);
      units.back() += (numels.back() + ranks - 1) / ranks;
    }
    const SavedLayout layout = SavedLayout::sliced(numels, units, ranks, "here");
    const std::map<Home, int64_t> found = homes(layout, numels);
    int64_t element = 0, row = 0;
    for (const int64_t numel : numels) {
      const int64_t slice = (numel + ranks - 1) / ranks;
      for (int64_t at = 0; at < numel; ++at, ++element) {
        int64_t in_unit = row + at % slice;
        int32_t unit = 0;
        while (in_unit >= units[static_cast<size_t>(unit)]) in_unit -= units[static_cast<size_t>(unit++)];
        ASSERT_EQ(found.at(Home(static_cast<int32_t>(at / slice), unit, in_unit)), element);
      }
      row += slice;
    }
  }
}

TEST(SavedLayout, PartitionsThatAreSavedAreEvenAndHaveTheirPaddingAtTheEnd) {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    const int32_t ranks = 1 + static_cast<int32_t>(random() % 5);
    std::vector<int64_t> numels;
    int64_t total = 0;
    for (size_t i = random() % 6; i > 0; --i) {
      numels.push_back(random() % 4 == 0 ? 0 : static_cast<int64_t>(random() % 20));
      total += numels.back();
    }
    const SavedLayout layout = SavedLayout::partitioned(numels, ranks);
    const int64_t size = layout.partition(0);
    EXPECT_EQ(size % 2, 0);
    EXPECT_GE(size * ranks, total);
    EXPECT_LT((size - 2) * ranks, total + (total == 0 ? 1 : 0));
    const std::map<Home, int64_t> found = homes(layout, numels);
    int64_t begin = 0;
    for (size_t param = 0; param < numels.size(); begin += numels[param++]) EXPECT_EQ(layout.begin(param), begin);
    for (int64_t at = 0; at < total; ++at) ASSERT_EQ(found.at(Home(static_cast<int32_t>(at / size), 0, at % size)), at);
  }
}

TEST(SavedLayout, SubGroupsThatAreSavedAreFoundByTheirSizes) {
  std::mt19937 random(4);
  for (int round = 0; round < 500; ++round) {
    const int32_t ranks = 1 + static_cast<int32_t>(random() % 5);
    const int64_t most = 1 + static_cast<int64_t>(random() % 40);
    std::vector<std::vector<int64_t>> groups(1 + random() % 3), units;
    std::vector<int64_t> saved, params, sizes;  // of those that are not elsewhere; of the units in a rank's file
    int64_t param = 0;
    for (auto& group : groups) {
      int64_t held = 0;
      bool open = false;
      for (size_t i = random() % 6; i > 0; --i, ++param) {
        group.push_back(random() % 5 == 0 ? -1 : 1 + static_cast<int64_t>(random() % 20));
        const int64_t numel = group.back();
        if (numel < 0) continue;
        if (!open || held + numel > most) {
          units.emplace_back();
          sizes.push_back(0);
          held = 0;
        }
        open = true;
        held += numel;
        units.back().push_back(param);
        sizes.back() += (numel + ranks - 1) / ranks;
        saved.push_back(numel);
        params.push_back(param);
      }
    }
    const SavedLayout layout = SavedLayout::sub_grouped(groups, most, ranks);
    ASSERT_EQ(layout.units(), units);
    const SavedLayout read = SavedLayout::sliced(saved, sizes, ranks, "here");
    EXPECT_EQ(read.units().size(), units.size());
    for (size_t i = 0; i < params.size(); ++i) {
      const auto number = static_cast<size_t>(params[i]);
      EXPECT_EQ(layout.unit(number), read.unit(i));
      EXPECT_EQ(layout.begin(number), read.begin(i));
      EXPECT_EQ(layout.index_in_unit(number), read.index_in_unit(i));
      EXPECT_EQ(layout.runs(number).size(), read.runs(i).size());
    }
    for (int64_t other = 0; other < param; ++other) {
      if (std::count(params.begin(), params.end(), other) > 0) continue;
      EXPECT_EQ(layout.unit(static_cast<size_t>(other)), -1);
      EXPECT_TRUE(layout.runs(static_cast<size_t>(other)).empty());
    }
  }
}

TEST(SavedLayout, WritersShareByElementsInOrder) {
  const std::vector<int64_t> numels = {7, 100, 3, 50, 50, 0, 90, 1, 1, 1, 80, 20, 60, 33};
  const int64_t total = std::accumulate(numels.begin(), numels.end(), int64_t{0});
  for (const int32_t count : {1, 2, 3, 8}) {
    const std::vector<int32_t> writers = writers_of(numels, count);
    ASSERT_EQ(writers.size(), numels.size());
    std::vector<int64_t> loads(static_cast<size_t>(count));
    for (size_t i = 0; i < numels.size(); ++i) {
      ASSERT_TRUE(writers[i] >= (i > 0 ? writers[i - 1] : 0) && writers[i] < count);
      loads[static_cast<size_t>(writers[i])] += numels[i];
    }
    EXPECT_LE(*std::max_element(loads.begin(), loads.end()), total / count + 101);
    EXPECT_TRUE(writers_of({}, count).empty());
    EXPECT_EQ(writers_of({0, 0}, count), (std::vector<int32_t>{0, 0}));
  }
}

TEST(SavedLayout, IndicesCountTheParametersOfAUnit) {
  const SavedLayout flat = SavedLayout::flat({{3, 4}, {5}}, {7, 5}, 1, "here");
  EXPECT_EQ(flat.unit(1), 0);
  EXPECT_EQ(flat.index_in_unit(1), 1);
  EXPECT_EQ(flat.unit(2), 1);
  EXPECT_EQ(flat.index_in_unit(2), 0);
  const SavedLayout sliced = SavedLayout::sliced({4, 2, 6, 2}, {3, 4}, 2, "here");
  EXPECT_EQ(sliced.unit(1), 0);
  EXPECT_EQ(sliced.index_in_unit(1), 1);
  EXPECT_EQ(sliced.unit(3), 1);
  EXPECT_EQ(sliced.index_in_unit(3), 1);
}

void expect_refused(const std::function<void()>& make, const std::string& part) {
  EXPECT_TRUE(says(error_of(ErrorKind::kValue, [&] { make(); }), part));
}

TEST(SavedLayout, WhatDoesNotFitIsNamed) {
  expect_refused(
      [] {
        SavedLayout::flat({{3}, {9}}, {2, 4}, 2, "the checkpoint x");
      },
      "the checkpoint x: parameter group 1 has 9 elements, and its 2 shard(s) of 4 hold 8");
  expect_refused(
      [] {
        SavedLayout::sliced({9, 2}, {5}, 2, "the checkpoint x");
      },
      "a rank's slices of 2 parameters have 6 elements when 2 rank(s) share them, and its files hold 5");
  EXPECT_EQ(SavedLayout::sliced({9, 2}, {}, 2, "without states").runs(0).size(), 2U);
}

}  // namespace
}  // namespace ds::plan
