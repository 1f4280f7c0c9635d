#include "plan/tensor_cut.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <tuple>

#include "../error_of.h"
#include "base/ranges.h"

namespace ds::plan {
namespace {

using Runs = std::vector<UnitRun>;
using Sizes = std::vector<int64_t>;

int64_t number(std::mt19937& random, int64_t least, int64_t most) {
  return least + static_cast<int64_t>(random() % static_cast<uint64_t>(most - least + 1));
}

Sizes members(const UnitRun& run) {
  Sizes found;
  for (int64_t unit = run.first; unit < run.second; ++unit) found.push_back(unit);
  return found;
}

// The units of all runs, one run after the other.
Sizes members(const Runs& runs) {
  Sizes found;
  for (const UnitRun& run : runs) append(found, members(run));
  return found;
}

Sizes lengths(const Runs& runs) {
  Sizes found;
  for (const auto& [start, stop] : runs) found.push_back(stop - start);
  return found;
}

// Each rank has the key/value heads that its query heads read, and no others.
void expect_read(const Runs& query, const Runs& shared, int64_t readers) {
  ASSERT_EQ(shared.size(), query.size());
  for (size_t rank = 0; rank < query.size(); ++rank) {
    Sizes read;
    for (const int64_t head : members(query[rank])) read.push_back(head / readers);
    sort_unique(read);
    EXPECT_EQ(members(shared[rank]), read);
  }
}

TEST(UnitRuns, DealUnitsOneAfterTheOther) {
  EXPECT_EQ(unit_runs(5, 3), (Runs{{0, 2}, {2, 4}, {4, 5}}));
  EXPECT_EQ(unit_runs(2, 4), (Runs{{0, 1}, {1, 2}, {2, 2}, {2, 2}}));
  for (int64_t count = 0; count < 40; ++count) {
    for (int64_t ranks = 1; ranks <= 8; ++ranks) {
      Sizes wanted(static_cast<size_t>(ranks));
      for (int64_t unit = 0; unit < count; ++unit) ++wanted[static_cast<size_t>(unit % ranks)];
      EXPECT_EQ(lengths(unit_runs(count, ranks)), wanted);
      EXPECT_EQ(members(unit_runs(count, ranks)), members(UnitRun{0, count}));
    }
  }
  EXPECT_TRUE(says(error_of(ErrorKind::kValue, [] { unit_runs(3, 0); }), "1 rank or more, got 0"));
  EXPECT_TRUE(says(error_of(ErrorKind::kValue, [] { unit_runs(-3, 2); }), "-3 units cannot be cut for 2 ranks"));
}

TEST(SharedRuns, AreTheHeadsThatQueryHeadsRead) {
  for (int64_t count = 1; count <= 6; ++count) {
    for (int64_t readers = 1; readers <= 6; ++readers) {
      for (int64_t ranks = 1; ranks <= 8; ++ranks) {
        const Runs query = unit_runs(count * readers, ranks);
        expect_read(query, shared_runs(query, readers, count), readers);
      }
    }
  }
  EXPECT_EQ(shared_runs({{0, 1}, {1, 1}}, 1, 1), (Runs{{0, 1}, {0, 0}}));
}

TEST(SharedRuns, RefuseRunsOfOtherHeads) {
  const auto refused = [](const Runs& runs, int64_t readers, int64_t count) {
    return error_of(ErrorKind::kValue, [&] { shared_runs(runs, readers, count); });
  };
  EXPECT_TRUE(says(refused({{0, 1}}, 0, 1), "1 query head or more that read it, got 0"));
  const std::string past = refused({{0, 2}, {2, 7}}, 3, 2);
  EXPECT_TRUE(says(past, "from 2 to 7: 2 key/value heads with 3 readers each have 6 query heads"));
  EXPECT_TRUE(says(refused({{-1, 2}}, 3, 2), "from -1 to 2"));
  EXPECT_TRUE(says(refused({{2, 1}}, 3, 2), "from 2 to 1"));
  EXPECT_TRUE(says(refused({{0, 1}}, int64_t{1} << 62, 4), "more than an integer here can hold"));
}

TEST(GroupedRuns, KeepWholeHeadsWithThoseThatReadThem) {
  int uneven = 0, copied = 0, others = 0;
  for (int64_t kv = 1; kv <= 12; ++kv) {
    for (int64_t readers = 1; readers <= 9; ++readers) {
      for (int64_t ranks = 1; ranks <= 8; ++ranks) {
        const int64_t query = kv * readers;
        if (kv < ranks && ranks % kv == 0 && query < ranks) continue;  // refused, as a test below says
        const auto [queries, shared] = grouped_runs(query, kv, ranks);
        EXPECT_EQ(queries.size(), static_cast<size_t>(ranks));
        EXPECT_EQ(members(queries), members(UnitRun{0, query}));
        expect_read(queries, shared, readers);
        if (kv >= ranks) {
          ++uneven;
          EXPECT_EQ(shared, unit_runs(kv, ranks));
        } else if (ranks % kv == 0) {
          ++copied;
          for (int64_t rank = 0; rank < ranks; ++rank) {
            const int64_t head = rank / (ranks / kv), dealt = lengths(queries)[static_cast<size_t>(rank)];
            EXPECT_EQ(shared[static_cast<size_t>(rank)], (UnitRun{head, head + 1}));
            EXPECT_TRUE(dealt == query / ranks || dealt == query / ranks + 1) << dealt;
          }
        } else {
          ++others;
          EXPECT_EQ(queries, unit_runs(query, ranks));
        }
      }
    }
  }
  EXPECT_GT(std::min({uneven, copied, others}), 50);
}

TEST(GroupedRuns, OfModelsThatExist) {
  EXPECT_EQ(lengths(grouped_runs(32, 8, 3).second), (Sizes{3, 3, 2}));
  EXPECT_EQ(lengths(grouped_runs(32, 8, 3).first), (Sizes{12, 12, 8}));
  EXPECT_EQ(lengths(grouped_runs(71, 1, 8).first), (Sizes{9, 9, 9, 9, 9, 9, 9, 8}));
  EXPECT_EQ(grouped_runs(71, 1, 8).second, Runs(8, {0, 1}));
  const Runs copies{{0, 1}, {0, 1}, {1, 2}, {1, 2}};  // the first copy has two of the three readers of its head
  EXPECT_EQ(grouped_runs(6, 2, 4), std::make_pair(Runs{{0, 2}, {2, 3}, {3, 5}, {5, 6}}, copies));
  const Runs published{{0, 1}, {0, 2}, {1, 2}};  // the second rank reads both
  EXPECT_EQ(grouped_runs(12, 2, 3), std::make_pair(Runs{{0, 4}, {4, 8}, {8, 12}}, published));
}

TEST(GroupedRuns, RefuseWhatCannotBeDealt) {
  const auto refused = [](int64_t query, int64_t kv, int64_t ranks) {
    return error_of(ErrorKind::kValue, [&] { grouped_runs(query, kv, ranks); });
  };
  EXPECT_TRUE(
      says(refused(6, 2, 8), "6 query heads leaves some of 8 tensor-parallel ranks without one: use at most 6"));
  EXPECT_TRUE(says(refused(6, 4, 2), "6 query heads and 4 key/value heads"));
  EXPECT_TRUE(says(refused(0, 1, 2), "0 query heads and 1 key/value heads"));
  EXPECT_TRUE(says(refused(4, 0, 2), "4 query heads and 0 key/value heads"));
  EXPECT_TRUE(says(refused(4, 2, 0), "1 rank or more, got 0"));
}

TEST(ShardSizes, AreThePublishedOnes) {
  EXPECT_EQ(shard_sizes(1001, 2, 1, 0), (Sizes{501, 500}));
  EXPECT_EQ(shard_sizes(24, 3, 1, 8), (Sizes{9, 9, 6}));  // three heads are three elements each
  EXPECT_EQ(shard_sizes(256, 3, 64, 0), (Sizes{128, 64, 64}));
  EXPECT_EQ(shard_sizes(10, 4, 64, 0), (Sizes{3, 3, 2, 2}));  // less than one grain
  EXPECT_EQ(shard_sizes(0, 2, 1, 4), (Sizes{0, 0}));
  std::mt19937 random(5);
  for (int round = 0; round < 500; ++round) {
    const int64_t ranks = number(random, 1, 8), grain = number(random, 1, 6), units = number(random, 0, 6);
    const int64_t total = number(random, 0, 20) * (round % 2 == 0 ? grain : std::max<int64_t>(units, 1));
    const bool whole_units = units > 0 && total % units == 0;
    Sizes wanted;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      if (whole_units) {
        wanted.push_back(total * (units / ranks + (rank < units % ranks ? 1 : 0)) / units);
      } else if (total >= grain) {
        const int64_t grains = total / grain;
        wanted.push_back((grains / ranks + (rank < grains % ranks ? 1 : 0)) * grain);
      } else {
        wanted.push_back(total / ranks + (rank < total % ranks ? 1 : 0));
      }
    }
    EXPECT_EQ(shard_sizes(total, ranks, grain, units), wanted);
  }
}

TEST(ShardSizes, LeaveOutWhatIsLessThanAGrain) { EXPECT_EQ(shard_sizes(1001, 2, 64, 0), (Sizes{512, 448})); }

TEST(ShardSizes, RefuseWrongNumbers) {
  const auto refused = [](int64_t total, int64_t ranks, int64_t grain, int64_t units) {
    return error_of(ErrorKind::kValue, [&] { shard_sizes(total, ranks, grain, units); });
  };
  EXPECT_TRUE(says(refused(8, 2, 0, 0), "tp_grain_size is 0"));
  EXPECT_TRUE(says(refused(8, 2, 1, -1), "-1 key/value heads"));
  EXPECT_TRUE(says(refused(8, 0, 1, 0), "1 rank or more, got 0"));
  EXPECT_TRUE(says(refused(-8, 2, 1, 2), "-8 units"));
}

// A random cut: runs that lie end to end, some of which then grow into those of neighbours.
std::vector<Runs> random_runs(const Sizes& sizes, int64_t ranks, std::mt19937& random) {
  std::vector<Runs> all;
  for (const int64_t size : sizes) {
    Sizes edges{0, size};
    for (int64_t rank = 1; rank < ranks; ++rank) edges.push_back(number(random, 0, size));
    sort(edges);
    Runs runs;
    for (size_t rank = 0; rank + 1 < edges.size(); ++rank) runs.emplace_back(edges[rank], edges[rank + 1]);
    const int64_t kind = number(random, 0, 3);
    for (auto& [start, stop] : runs) {
      if (kind == 1) std::tie(start, stop) = UnitRun{0, size};  // every rank has all of it
      if (kind == 2 && number(random, 0, 2) == 0) stop = number(random, stop, size);
    }
    if (kind == 3) std::shuffle(runs.begin(), runs.end(), random);
    all.push_back(runs);
  }
  return all;
}

// A cut as plain lists: the elements of each rank's slice, and the ranks that have each element.
struct Plain {
  std::vector<Sizes> slices;
  std::vector<std::vector<int>> ranks_of;

  Plain(const Sizes& sizes, const std::vector<Runs>& runs) : slices(runs[0].size()) {
    for (size_t sub = 0; sub < sizes.size(); ++sub) {
      const auto before = static_cast<int64_t>(ranks_of.size());
      ranks_of.resize(static_cast<size_t>(before + sizes[sub]));
      for (size_t rank = 0; rank < slices.size(); ++rank) {
        for (int64_t element = runs[sub][rank].first; element < runs[sub][rank].second; ++element) {
          slices[rank].push_back(before + element);
          ranks_of[static_cast<size_t>(before + element)].push_back(static_cast<int>(rank));
        }
      }
    }
  }

  // The sets of ranks that have the elements of a slice.
  std::set<std::vector<int>> sharers(size_t rank) const {
    std::set<std::vector<int>> found;
    for (const int64_t element : slices[rank]) found.insert(ranks_of[static_cast<size_t>(element)]);
    return found;
  }
};

void expect_runs(const TensorCut& cut, const Plain& plain, int rank) {
  Sizes elements;
  int64_t last = -1;
  for (const auto& [start, length] : cut.runs(rank)) {
    EXPECT_GT(length, 0);
    EXPECT_NE(start, last);  // touching runs are one
    last = start + length;
    for (int64_t i = 0; i < length; ++i) elements.push_back(start + i);
  }
  EXPECT_EQ(elements, plain.slices[static_cast<size_t>(rank)]);
  EXPECT_EQ(cut.width(rank), static_cast<int64_t>(elements.size()));
}

void expect_owned(const TensorCut& cut, const Plain& plain, int rank) {
  std::vector<std::pair<int64_t, int64_t>> wanted, found;  // (in the slice, in the whole), element by element
  const Sizes& slice = plain.slices[static_cast<size_t>(rank)];
  for (size_t at = 0; at < slice.size(); ++at) {
    if (plain.ranks_of[static_cast<size_t>(slice[at])].front() == rank) wanted.emplace_back(at, slice[at]);
  }
  UnitRun last{-1, -1};
  for (const CutPiece& piece : cut.owned(rank)) {
    EXPECT_GT(piece.length, 0);
    EXPECT_NE((UnitRun{piece.in_slice, piece.in_whole}), last);
    last = {piece.in_slice + piece.length, piece.in_whole + piece.length};
    for (int64_t i = 0; i < piece.length; ++i) found.emplace_back(piece.in_slice + i, piece.in_whole + i);
  }
  EXPECT_EQ(found, wanted);
}

TEST(TensorCut, AnswersAsPlainLoopsDo) {
  std::mt19937 random(11);
  int copied = 0, mixed = 0, grouped = 0;
  for (int round = 0; round < 800; ++round) {
    const int64_t ranks = round % 8 + 1;
    Sizes sizes(static_cast<size_t>(number(random, 1, 4)));
    for (int64_t& size : sizes) size = number(random, 0, 11);
    const std::vector<Runs> runs = random_runs(sizes, ranks, random);
    const TensorCut cut(sizes, runs);
    const Plain plain(sizes, runs);
    EXPECT_EQ(cut.ranks(), ranks);
    EXPECT_EQ(cut.size(), static_cast<int64_t>(plain.ranks_of.size()));
    bool some_mixed = false;
    for (int rank = 0; rank < ranks; ++rank) {
      expect_runs(cut, plain, rank);
      expect_owned(cut, plain, rank);
      const auto sharers = plain.sharers(static_cast<size_t>(rank));
      if (sharers.empty()) {
        EXPECT_EQ(cut.holders(rank), std::vector<int>{rank});
      } else {
        EXPECT_EQ(cut.holders(rank), sharers.size() == 1 ? *sharers.begin() : std::vector<int>{});
        grouped += sharers.size() == 1 && sharers.begin()->size() > 1;
      }
      some_mixed = some_mixed || (sharers.count({rank}) > 0 && sharers.size() > 1);
    }
    EXPECT_EQ(cut.mixed(), some_mixed);
    const bool some_copied = any_of(plain.ranks_of, [](const auto& all) { return all.size() > 1; });
    EXPECT_EQ(cut.copied(), some_copied);
    copied += some_copied;
    mixed += some_mixed;
  }
  EXPECT_GT(std::min({copied, mixed, grouped}), 50);
}

TEST(TensorCut, OfAFusedAttentionWithCopies) {
  // Heads of one element: three query heads for each of two key/value heads, over four ranks.
  const auto [query, kv] = grouped_runs(6, 2, 4);
  const TensorCut cut({6, 2, 2}, {query, kv, kv});
  using Pieces = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(cut.runs(0), (Pieces{{0, 2}, {6, 1}, {8, 1}}));
  EXPECT_EQ(cut.runs(3), (Pieces{{5, 1}, {7, 1}, {9, 1}}));
  EXPECT_EQ(cut.width(1), 3);
  ASSERT_EQ(cut.owned(1).size(), 1U);
  EXPECT_EQ(cut.owned(1)[0].in_whole, 2);
  EXPECT_TRUE(cut.copied());
  EXPECT_TRUE(cut.mixed());
  EXPECT_EQ(cut.holders(0), std::vector<int>{});
  EXPECT_EQ(TensorCut({2}, {kv}).holders(3), (std::vector<int>{2, 3}));
  EXPECT_EQ(TensorCut({6}, {query}).runs(1), (Pieces{{2, 1}}));
}

TEST(TensorCut, RefusesWhatDoesNotFit) {
  const auto refused = [](const Sizes& sizes, const std::vector<Runs>& runs) {
    return error_of(ErrorKind::kValue, [&] { TensorCut(sizes, runs); });
  };
  EXPECT_TRUE(says(refused({}, {}), "a cut of 0 sub-parameters with runs for 0"));
  EXPECT_TRUE(says(refused({2}, {{{0, 2}}, {{0, 2}}}), "a cut of 1 sub-parameters with runs for 2"));
  EXPECT_TRUE(says(refused({-2}, {{{0, 0}}}), "sub-parameter 0 has -2 elements"));
  EXPECT_TRUE(says(refused({2}, {{}}), "1 rank or more, got 0"));
  EXPECT_TRUE(says(refused({2, 2}, {{{0, 2}}, {{0, 1}, {1, 2}}}), "sub-parameter 1 has runs for 2 ranks"));
  EXPECT_TRUE(says(refused({2, 4}, {{{0, 2}}, {{0, 5}}}), "rank 0 has elements from 0 to 5 of sub-parameter 1"));
  EXPECT_TRUE(says(refused({4}, {{{0, 4}, {3, 2}}}), "rank 1 has elements from 3 to 2 of sub-parameter 0"));
  EXPECT_TRUE(says(refused({4}, {{{-1, 4}}}), "rank 0 has elements from -1 to 4"));
  EXPECT_TRUE(says(refused({4, 6}, {{{0, 4}, {0, 4}}, {{0, 2}, {4, 6}}}), "no rank has the elements from 2 to 4"));
  EXPECT_TRUE(says(refused({4, 6}, {{{0, 4}, {0, 4}}, {{0, 2}, {4, 6}}}), "of sub-parameter 1"));
  const int64_t most = INT64_MAX;
  EXPECT_TRUE(says(refused({most, most}, {{{0, most}}, {{0, most}}}), "more than an integer here can hold"));
  const TensorCut cut({2}, {{{0, 1}, {1, 2}}});
  EXPECT_TRUE(says(error_of(ErrorKind::kValue, [&] { cut.width(2); }), "rank 2 is not one of the 2 ranks"));
  EXPECT_TRUE(says(error_of(ErrorKind::kValue, [&] { cut.owned(-1); }), "rank -1 is not one of the 2 ranks"));
}

}  // namespace
}  // namespace ds::plan
