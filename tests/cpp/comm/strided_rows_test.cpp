// Rows of several ranks through slots of any size, with stores that go past the caches and without: against torch's
// copies of the same views.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <random>

#include "comm/calls/strided_parts.h"

namespace ds::comm {
namespace {

// A view with any strides, of whole numbers that tell its elements apart.
at::Tensor some_view(std::mt19937& random, int64_t first, at::ScalarType type, bool filled) {
  const auto below = [&](int most) { return static_cast<int64_t>(random() % static_cast<unsigned>(most)); };
  const std::vector<int64_t> sizes = {1 + below(3), 1 + below(9), below(12) == 0 ? 0 : 1 + below(5), 1 + below(211)};
  at::Tensor all = at::empty({sizes[0] + 1, sizes[1], sizes[2] + 2, sizes[3] + below(3)}, at::kDouble);
  if (filled) all.copy_(at::arange(first, first + all.numel(), at::kDouble).remainder_(127).view(all.sizes()));
  if (!filled) all.fill_(-1);
  all = all.to(type);
  const int64_t kind = below(3);
  if (kind == 1) all = all.transpose(1, 2).contiguous().transpose(1, 2);
  if (kind == 2) all = all.transpose(0, 3).contiguous().transpose(0, 3);
  at::Tensor view = all.narrow(0, 1, sizes[0]).narrow(2, 1, sizes[2]).narrow(3, 0, sizes[3]);
  return below(2) == 0 ? view.permute({0, 2, 1, 3}) : view;
}

at::Tensor flattened(const std::vector<StridedView>& views, at::ScalarType type) {
  std::vector<at::Tensor> flat = {at::empty({0}, type)};
  for (const StridedView& view : views) flat.push_back(view.tensor().reshape({-1}));
  return at::cat(flat);
}

void compare(std::mt19937& random, int ranks, at::ScalarType type, bool past_caches) {
  // Each rank gives the same views to everyone; what it takes has as many elements in views of its own.
  std::vector<StridedParts> parts;
  std::vector<std::vector<StridedView>> given;
  for (int rank = 0; rank < ranks; ++rank) {
    given.emplace_back();
    for (int i = 0; i < 3; ++i) given.back().emplace_back(some_view(random, 100 * rank + i, type, true));
  }
  for (int rank = 0; rank < ranks; ++rank) {
    StridedParts::Views give, take;
    for (int other = 0; other < ranks; ++other) {
      give.push_back(given[rank]);
      take.emplace_back();
      int64_t left = 0;
      for (const StridedView& view : given[other]) left += view.numel();
      while (left > 0) {
        at::Tensor view = some_view(random, 0, type, false);
        if (view.numel() > left) view = at::full({2 * left}, -1, type).as_strided({left}, {2});
        left -= view.numel();
        take.back().emplace_back(view);
      }
    }
    parts.emplace_back(give, take);
  }
  const auto bytes_of = [&](int from, int to) {
    return static_cast<size_t>(parts[from].give_counts()[to]) * c10::elementSize(type);
  };
  for (int giver = 0; giver < ranks; ++giver) {
    const RowsOfRanks rows = parts[giver].rows();
    size_t most = 0, done = 0;
    for (int taker = 0; taker < ranks; ++taker) most = std::max(most, bytes_of(giver, taker));
    while (done < most) {
      const size_t step = 1 + random() % 9000;
      std::vector<std::vector<char>> memory(ranks, std::vector<char>(step));
      std::vector<RowsInSlot> slots;
      const auto some = [&](int taker) {
        const size_t bytes = bytes_of(giver, taker);
        return done >= bytes ? 0 : std::min(step, bytes - done);
      };
      for (int taker = 0; taker < ranks; ++taker)
        if (taker != giver) slots.push_back({taker, done, some(taker), memory[taker].data()});
      give_rows(rows, slots, giver, done, some(giver), past_caches);
      finish_stores();
      for (const RowsInSlot& slot : slots)
        take_rows(parts[slot.rank].rows(), {giver, slot.begin, slot.bytes, slot.slot}, past_caches);
      done += step;
    }
  }
  finish_stores();
  for (int taker = 0; taker < ranks; ++taker)
    for (int giver = 0; giver < ranks; ++giver)
      ASSERT_TRUE(at::equal(flattened(parts[taker].take()[giver], type), flattened(given[giver], type)))
          << giver << " to " << taker << " of " << ranks << (past_caches ? ", past the caches" : "");
}

TEST(StridedRows, EqualTorchsCopies) {
  std::mt19937 random(5);
  for (const int ranks : {1, 2, 3, 5, 8})
    for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble, at::kByte})
      for (const bool past_caches : {false, true}) compare(random, ranks, type, past_caches);
}

TEST(StridedRows, TouchNothingBesideTheView) {
  const at::Tensor given = at::arange(4 * 100 * 3, at::kFloat).view({4, 3, 100}), room = at::full({4, 7, 133}, -1.0f);
  const at::Tensor view = room.narrow(1, 2, 3).narrow(2, 5, 100);
  const StridedParts parts({{given}}, {{view}});
  give_rows(parts.rows(), {}, 0, 0, static_cast<size_t>(given.numel()) * 4, true);
  finish_stores();
  EXPECT_TRUE(at::equal(view, given));
  EXPECT_EQ(room.sum().item<float>(), given.sum().item<float>() - static_cast<float>(room.numel() - given.numel()));
}

}  // namespace
}  // namespace ds::comm
