// data *= factor. THE EXEMPLAR of a kernel's test: the reference against values computed by hand, then every
// instruction set against the reference, over dtypes x sizes x alignments x threads, special numbers included.
#include "support.h"

namespace ds::kernels::test {
namespace {

TEST(ScaleTest, TheReferenceMultiplies) {
  for (DType dtype : kDtypes) {
    Buffer data(dtype, 3);
    data.set(0, 1.5);
    data.set(1, -4);
    data.set(2, INFINITY);
    ref_table().scale({}, data.data(), dtype, 3, 0.5f);
    EXPECT_EQ(data.get(0), 0.75);
    EXPECT_EQ(data.get(1), -2);
    EXPECT_EQ(data.get(2), INFINITY);
  }
}

TEST(ScaleTest, EveryIsaEqualsTheReference) {
  ThreadPool pool(3);
  for (const KernelTable* table : isa_tables()) {
    for (DType dtype : kDtypes) {
      for (size_t n : kSizes) {
        for (size_t offset : {0, 1}) {
          Buffer want(dtype, n, offset);
          want.randomize(7).add_specials();
          Buffer got = want;
          ref_table().scale({}, want.data(), dtype, n, -0.3f);
          table->scale({&pool}, got.data(), dtype, n, -0.3f);
          EXPECT_TRUE(same(got, want)) << where(*table, dtype, dtype, n, offset);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ds::kernels::test
