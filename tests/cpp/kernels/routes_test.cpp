// The kernels of a mixture of experts: the reference against values by hand, every instruction set against the
// reference.
#include "kernels/routes.h"

#include "support.h"

namespace ds::kernels::test {
namespace {

const RouteKernels* find_routes(const char* isa) { return ds_cpu_route_kernels_isa(kRouteAbi, isa); }
const RouteKernels& ref_routes() { return *find_routes("ref"); }
auto isa_routes() { return of_each_isa(find_routes); }

// Rows of a sum of this many terms differ by so much between orders of the sum.
void expect_near(const Buffer& got, const Buffer& want, double terms, const std::string& where) {
  ASSERT_TRUE(got.canary_intact()) << where;
  const double eps = got.dtype() == DType::kF16 ? 1e-3 : got.dtype() == DType::kBF16 ? 8e-3 : 2e-7;
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got.get(i), want.get(i), eps * std::abs(want.get(i)) + 2e-7 * (terms + 1)) << where << " at " << i;
}

TEST(RoutesTest, TheReferenceGates) {
  const float logits[] = {0, 1, 1, -1, NAN, 0, 0, 0}, select[] = {5, 1, 2, 9, 0, 0, 0, 0};
  float probs[8];
  int32_t index[4];
  ref_routes().topk_gate({}, logits, nullptr, 2, 4, 2, probs, index);
  EXPECT_EQ(std::vector<int32_t>(index, index + 4), (std::vector<int32_t>{1, 2, -2, -2}));
  EXPECT_NEAR(probs[1], std::exp(1.0) / (1 + 2 * std::exp(1.0) + std::exp(-1.0)), 1e-6);
  ref_routes().topk_gate({}, logits, select, 1, 4, 2, probs, index);
  EXPECT_EQ(std::vector<int32_t>(index, index + 2), (std::vector<int32_t>{3, 0}));
}

TEST(RoutesTest, GatesEqualTheReference) {
  ThreadPool pool(3);
  for (size_t tokens : {0, 1, 37, 2000}) {
    for (size_t experts : {1, 3, 17, 64}) {
      for (size_t k = 1; k <= std::min<size_t>(experts, 4); k *= 2) {
        Buffer logits(DType::kF32, tokens * experts);
        logits.randomize(3);
        for (size_t i = 0; i < logits.size(); ++i) logits.set(i, std::round(logits.get(i) * 4) / 4);  // ties
        const auto* x = static_cast<const float*>(logits.data());
        Buffer want(DType::kF32, tokens * experts), got = want;
        std::vector<int32_t> want_index(tokens * k), got_index(tokens * k);
        ref_routes().topk_gate({}, x, nullptr, tokens, experts, k, static_cast<float*>(want.data()), want_index.data());
        for (const auto& isa : isa_routes()) {
          isa.kernels->topk_gate({&pool}, x, nullptr, tokens, experts, k, static_cast<float*>(got.data()),
                                 got_index.data());
          EXPECT_TRUE(same(got, want)) << isa.isa << " " << tokens << " " << experts;
          EXPECT_EQ(got_index, want_index) << isa.isa << " " << tokens << " " << experts << " " << k;
        }
      }
    }
  }
}

TEST(RoutesTest, RowsTravelAsInTheReference) {
  ThreadPool pool(3);
  for (DType dtype : kDtypes) {
    for (size_t width : {1, 7, 33, 130}) {
      for (size_t tokens : {0, 1, 45, 300}) {
        for (size_t k : {1, 3}) {
          // Slots of assignments: some dropped, the others a permutation with gaps.
          const size_t rows = tokens * k + 5;
          std::vector<int32_t> slot(tokens * k), index(rows, -1);
          for (size_t a = 0; a < slot.size(); ++a)
            slot[a] = a % 5 == 3 ? -1 : static_cast<int32_t>((a * 11 + 2) % rows);
          for (size_t a = slot.size(); a-- > 0;)
            if (slot[a] >= 0) index[slot[a]] = static_cast<int32_t>(a);
          Buffer src(dtype, tokens * width), moved(dtype, rows * width), grad(dtype, tokens * width);
          Buffer weight(DType::kF32, tokens * k);
          src.randomize(1), moved.randomize(2), grad.randomize(4), weight.randomize(3);
          for (const float* w : {static_cast<const float*>(nullptr), static_cast<const float*>(weight.data())}) {
            Buffer there(dtype, rows * width), back(dtype, tokens * width), dots(DType::kF32, tokens * k);
            ref_routes().permute_rows({}, there.data(), src.data(), dtype, width, rows, index.data(), w, k);
            ref_routes().combine_rows({}, back.data(), moved.data(), dtype, width, tokens, k, slot.data(), w);
            ref_routes().dot_rows({}, static_cast<float*>(dots.data()), moved.data(), grad.data(), dtype, width, tokens,
                                  k, slot.data());
            for (const auto& isa : isa_routes()) {
              const std::string where = std::string(isa.isa) + " " + dtype_name(dtype) + " " + std::to_string(width) +
                                        " x " + std::to_string(tokens) + " k=" + std::to_string(k);
              Buffer a(dtype, rows * width), b(dtype, tokens * width), c(DType::kF32, tokens * k);
              isa.kernels->permute_rows({&pool}, a.data(), src.data(), dtype, width, rows, index.data(), w, k);
              isa.kernels->combine_rows({&pool}, b.data(), moved.data(), dtype, width, tokens, k, slot.data(), w);
              isa.kernels->dot_rows({&pool}, static_cast<float*>(c.data()), moved.data(), grad.data(), dtype, width,
                                    tokens, k, slot.data());
              EXPECT_TRUE(same(a, there)) << where;
              EXPECT_TRUE(same(b, back)) << where;
              expect_near(c, dots, width, where);
            }
          }
        }
      }
    }
  }
}

TEST(RoutesTest, TheReferenceMultiplies) {
  const float a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 0, 2, 1, 1, 3}, bias[] = {10, 20};
  float c[4];
  const GemmGroup plain = {a, b, bias, c, 2, 2, 3};  // b is 3 x 2
  ref_routes().grouped_gemm({}, &plain, 1, {}, DType::kF32);
  EXPECT_EQ(std::vector<float>(c, c + 4), (std::vector<float>{18, 31, 30, 43}));
  const GemmGroup turned = {a, b, nullptr, c, 2, 2, 3};  // a is 3 x 2, b is 2 x 3
  ref_routes().grouped_gemm({}, &turned, 1, {true, true}, DType::kF32);
  EXPECT_EQ(std::vector<float>(c, c + 4), (std::vector<float>{11, 19, 14, 24}));
}

TEST(RoutesTest, ProductsOfManyGroupsEqualTheReference) {
  ThreadPool pool(3);
  // m, n, k: empty ones, odd ones, ones around the blocks (96, 256, 384).
  const int64_t sizes[][3] = {{0, 5, 3}, {4, 3, 0}, {1, 1, 1}, {7, 17, 5}, {97, 33, 31}, {13, 257, 19}, {12, 32, 385}};
  for (DType dtype : kDtypes) {
    for (int form = 0; form < 4; ++form) {
      for (bool biased : {false, true}) {
        std::vector<Buffer> a, b, bias, want, got;
        std::vector<GemmGroup> want_groups, got_groups;
        for (const auto& [m, n, k] : sizes) {
          a.emplace_back(dtype, m * k), b.emplace_back(dtype, k * n), bias.emplace_back(dtype, n);
          want.emplace_back(dtype, m * n), got.emplace_back(dtype, m * n);
          a.back().randomize(m + 1), b.back().randomize(n + 2), bias.back().randomize(k + 3);
        }
        for (size_t i = 0; i < std::size(sizes); ++i) {
          const auto& [m, n, k] = sizes[i];
          const void* one = biased ? bias[i].data() : nullptr;
          want_groups.push_back({a[i].data(), b[i].data(), one, want[i].data(), m, n, k});
          got_groups.push_back({a[i].data(), b[i].data(), one, got[i].data(), m, n, k});
        }
        const GemmForm how = {form % 2 == 1, form >= 2};
        ref_routes().grouped_gemm({}, want_groups.data(), want_groups.size(), how, dtype);
        for (const auto& isa : isa_routes()) {
          isa.kernels->grouped_gemm({&pool}, got_groups.data(), got_groups.size(), how, dtype);
          for (size_t i = 0; i < std::size(sizes); ++i)
            expect_near(got[i], want[i], static_cast<double>(sizes[i][2]),
                        std::string(isa.isa) + " " + dtype_name(dtype) + " form " + std::to_string(form) + " group " +
                            std::to_string(i));
        }
      }
    }
  }
}

TEST(RoutesTest, TheTableOfADeviceIsFound) {
  EXPECT_EQ(ds_route_kernels(kRouteAbi, "cpu"), ds_cpu_route_kernels_isa(kRouteAbi, ds_cpu_kernels(kKernelAbi)->isa));
  EXPECT_EQ(ds_route_kernels(kRouteAbi + 1, "cpu"), nullptr);
  EXPECT_EQ(ds_route_kernels(kRouteAbi, "abacus"), nullptr);
  if (ds_kernels(kKernelAbi, "cuda") != nullptr) {
    const RouteKernels* cuda = ds_route_kernels(kRouteAbi, "cuda");
    ASSERT_NE(cuda, nullptr);
    EXPECT_EQ(cuda->size, sizeof(RouteKernels));
    EXPECT_EQ(ds_route_kernels(kRouteAbi + 1, "cuda"), nullptr);
  }
}

}  // namespace
}  // namespace ds::kernels::test
