#include "plan/repartition.h"

#include <gtest/gtest.h>

#include <random>

#include "base/error.h"

namespace ds::plan {
namespace {

// A row of `total` elements, cut at random into runs of random owners; every element's value is its number.
struct Row {
  std::vector<OwnedRun> runs;
  std::vector<std::vector<std::vector<int64_t>>> pieces;  // [rank][piece]
};

Row random_row(int64_t total, int32_t parts, std::mt19937& random) {
  Row row;
  row.pieces.resize(parts);
  for (int64_t at = 0; at < total;) {
    const int64_t numel = std::min<int64_t>(total - at, std::uniform_int_distribution<int64_t>(0, 9)(random));
    const auto rank = std::uniform_int_distribution<int32_t>(0, parts - 1)(random);
    auto& mine = row.pieces[rank];
    row.runs.push_back({at, numel, rank, static_cast<int64_t>(mine.size()), 0});
    mine.emplace_back();
    for (int64_t i = 0; i < numel; ++i) mine.back().push_back(at + i);
    at += numel;
  }
  return row;
}

TEST(Repartition, EveryElementArrivesWhereItBelongs) {
  std::mt19937 random(7);
  for (int32_t parts : {1, 2, 3, 5, 8}) {
    for (int64_t total : {0, 1, 2, 13, 100, 257}) {
      const Row row = random_row(total, parts, random);
      const int64_t size = 2 * ((total + 2 * parts - 1) / (2 * parts));
      std::vector<std::vector<std::vector<int64_t>>> sent(parts);  // [from][to]
      for (int32_t rank = 0; rank < parts; ++rank) {
        const Repartition plan = repartition(row.runs, size, parts, rank);
        size_t next = 0;
        sent[rank].resize(parts);
        for (int32_t peer = 0; peer < parts; ++peer) {
          int64_t left = plan.give_numels[peer];
          for (; left > 0; ++next) {
            const Give& give = plan.give[next];
            const auto& piece = row.pieces[rank][give.piece];
            for (int64_t i = 0; i < give.numel; ++i) sent[rank][peer].push_back(piece.at(give.offset + i));
            left -= give.numel;
          }
          ASSERT_EQ(left, 0);
        }
        ASSERT_EQ(next, plan.give.size());
      }
      for (int32_t rank = 0; rank < parts; ++rank) {
        const Repartition plan = repartition(row.runs, size, parts, rank);
        std::vector<int64_t> partition(size, -1);
        size_t next = 0;
        for (int32_t peer = 0; peer < parts; ++peer) {
          ASSERT_EQ(plan.take_numels[peer], static_cast<int64_t>(sent[peer][rank].size()));
          for (size_t at = 0; at < sent[peer][rank].size(); ++next) {
            const Take& take = plan.take[next];
            for (int64_t i = 0; i < take.numel; ++i) partition.at(take.at + i) = sent[peer][rank].at(at++);
          }
        }
        for (int64_t i = 0; i < size; ++i)
          ASSERT_EQ(partition[i], rank * size + i < total ? rank * size + i : -1) << parts << " " << total;
      }
    }
  }
}

TEST(Repartition, RefusesWhatDoesNotFit) {
  EXPECT_THROW(repartition({{0, 5, 0, 0, 0}}, 2, 2, 0), Error);
}

}  // namespace
}  // namespace ds::plan
