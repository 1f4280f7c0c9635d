#include "support.h"

namespace ds::kernels::test {
namespace {

class PairTest : public testing::TestWithParam<std::pair<DType, DType>> {};

std::vector<std::pair<DType, DType>> all_pairs() {
  std::vector<std::pair<DType, DType>> pairs;
  for (DType dst : kDtypes)
    for (DType src : kDtypes) pairs.emplace_back(dst, src);
  return pairs;
}

INSTANTIATE_TEST_SUITE_P(Dtypes, PairTest, testing::ValuesIn(all_pairs()), [](const auto& info) {
  return std::string(dtype_name(info.param.first)) + "From" + dtype_name(info.param.second);
});

TEST_P(PairTest, CopyEqualsTheReference) {
  const auto [dst, src] = GetParam();
  ThreadPool pool(3);
  for (const KernelTable* table : isa_tables()) {
    for (size_t n : kSizes) {
      for (size_t offset : {0, 3}) {
        for (float scale : {1.0f, 0.37f}) {
          Buffer from(src, n, offset), want(dst, n), got(dst, n, offset);
          from.randomize(1).add_specials();
          ref_table().copy({}, want.data(), dst, from.data(), src, n, scale);
          table->copy({&pool}, got.data(), dst, from.data(), src, n, scale);
          EXPECT_TRUE(same(got, want)) << where(*table, dst, src, n, offset) << " scale " << scale;
        }
      }
    }
  }
}

TEST_P(PairTest, AccumulateEqualsTheReference) {
  const auto [dst, src] = GetParam();
  ThreadPool pool(3);
  for (const KernelTable* table : isa_tables()) {
    for (size_t n : kSizes) {
      for (size_t offset : {0, 5}) {
        Buffer from(src, n, offset), want(dst, n, offset);
        from.randomize(2).add_specials();
        want.randomize(3);
        Buffer got = want;
        ref_table().accumulate({}, want.data(), dst, from.data(), src, n, 0.25f);
        table->accumulate({&pool}, got.data(), dst, from.data(), src, n, 0.25f);
        EXPECT_TRUE(same(got, want)) << where(*table, dst, src, n, offset);
      }
    }
  }
}

// More moves than one launch takes, of odd sizes, also none; what lies between them stays.
TEST_P(PairTest, ManyMovesEqualOneByOne) {
  const auto [to, from] = GetParam();
  ThreadPool pool(3);
  for (const KernelTable* table : isa_tables()) {
    for (bool add : {false, true}) {
      const ManyMoves many(to, from);
      Buffer want = many.target, got = many.target;
      for (const Move& move : many.moves(want.data(), many.source.data()))
        (add ? ref_table().accumulate : ref_table().copy)({}, move.to, to, move.from, from, move.numel, 0.37f);
      const std::vector<Move> moves = many.moves(got.data(), many.source.data());
      table->move_all({&pool}, moves.data(), moves.size(), to, from, 0.37f, add);
      EXPECT_TRUE(same(got, want)) << table->isa << " " << add;
    }
  }
}

TEST(CopyTest, InPlaceWhereElementSizesAreEqual) {
  ThreadPool pool(2);
  for (const KernelTable* table : isa_tables()) {
    Buffer data(DType::kF32, 70001);
    data.randomize(4);
    Buffer want = data;
    table->copy({&pool}, data.data(), DType::kF32, data.data(), DType::kF32, data.size(), 1.0f);
    EXPECT_TRUE(same(data, want)) << table->isa;
    Buffer half(DType::kF16, 70001), bf16(DType::kBF16, 70001);
    half.randomize(5);
    table->copy({}, bf16.data(), DType::kBF16, half.data(), DType::kF16, half.size(), 2.0f);
    table->copy({&pool}, half.data(), DType::kBF16, half.data(), DType::kF16, half.size(), 2.0f);
    EXPECT_EQ(std::memcmp(half.data(), bf16.data(), half.bytes()), 0) << table->isa;
  }
}

// The numbers as they must be, without the help of the reference.
TEST(CopyTest, RoundsToNearestEven) {
  for (const KernelTable* table : isa_tables()) {
    const float source[] = {1.00390625f, 1.01171875f, 1.005f, 3.3895314e38f, 3.4028235e38f, -1.00390625f, 1.0f, 2.5f};
    const uint16_t expected[] = {0x3f80, 0x3f82, 0x3f81, 0x7f7f, 0x7f80, 0xbf80, 0x3f80, 0x4020};
    uint16_t got[8];
    table->copy({}, got, DType::kBF16, source, DType::kF32, 8, 1.0f);
    for (int i = 0; i < 8; ++i) EXPECT_EQ(got[i], expected[i]) << table->isa << " " << source[i];
  }
}

TEST(AccumulateTest, AddsInFp32AndRoundsOnce) {
  for (const KernelTable* table : isa_tables()) {
    Bf16 dst = to_bf16(256.0f);  // its neighbours are 2 apart
    const float src = 0.75f;
    table->accumulate({}, &dst, DType::kBF16, &src, DType::kF32, 1, 2.0f);  // 257.5 is nearer to 258
    EXPECT_EQ(to_float(dst), 258.0f) << table->isa;
  }
}

}  // namespace
}  // namespace ds::kernels::test
