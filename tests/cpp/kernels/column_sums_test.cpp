// Sums of magnitudes down columns: the reference by hand, then every instruction set against it.
#include "support.h"

namespace ds::kernels::test {
namespace {

TEST(ColumnSumsTest, TheReferenceAddsMagnitudes) {
  for (DType dtype : kDtypes) {
    Buffer data(dtype, 5);  // columns 2, 0, 1, 2, 0 of three
    const double values[] = {1.5, -2, 0.25, -4, 8};
    for (size_t i = 0; i < 5; ++i) data.set(i, values[i]);
    double sums[3] = {1, 0, 0};
    ref_table().column_sums({}, data.data(), dtype, 5, 2, 3, sums);
    EXPECT_EQ(sums[0], 1 + 2 + 8);
    EXPECT_EQ(sums[1], 0.25);
    EXPECT_EQ(sums[2], 1.5 + 4);
  }
}

TEST(ColumnSumsTest, EveryIsaEqualsTheReference) {
  ThreadPool pool(3);
  for (const KernelTable* table : isa_tables()) {
    for (DType dtype : kDtypes) {
      for (size_t n : kSizes) {
        for (size_t columns : {size_t{1}, size_t{3}, size_t{129}, size_t{5000}}) {
          for (size_t first : {size_t{0}, columns / 2, columns - 1}) {
            Buffer data(dtype, n, n % 2), want(DType::kF64, columns);
            data.randomize(7).add_specials();
            want.randomize(8);
            Buffer got = want;
            ref_table().column_sums({}, data.data(), dtype, n, first, columns, static_cast<double*>(want.data()));
            table->column_sums({&pool}, data.data(), dtype, n, first, columns, static_cast<double*>(got.data()));
            ASSERT_TRUE(same(got, want)) << where(*table, dtype, dtype, n, first) << " columns " << columns;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ds::kernels::test
