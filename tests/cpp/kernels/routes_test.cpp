// The kernels of a mixture of experts: the reference against values by hand, every instruction set and the GPU against
// the reference.
#include "kernels/routes.h"

#include <memory>

#include "device.h"

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

class CudaRoutesTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped()) routes = ds_route_kernels(kRouteAbi, "cuda");
  }
  static Buffer of_integers(const std::vector<int32_t>& values) {
    Buffer buffer(DType::kF32, values.size());
    if (!values.empty()) std::memcpy(buffer.data(), values.data(), buffer.bytes());
    return buffer;
  }
  const RouteKernels* routes = nullptr;
};

TEST_F(CudaRoutesTest, GatesEqualTheReference) {
  for (size_t tokens : {0, 1, 31, 33}) {
    for (size_t experts : {1, 3, 32, 65}) {
      for (size_t k = 1; k <= std::min<size_t>(experts, 4); k *= 2) {
        for (bool selects : {false, true}) {
          Buffer logits(DType::kF32, tokens * experts, 1), select = logits;
          logits.randomize(3), select.randomize(4);
          for (size_t i = 0; i < logits.size(); ++i) logits.set(i, std::round(logits.get(i) * 4) / 4);  // ties
          if (tokens > 30) logits.set(30 * experts, NAN);
          Buffer want(DType::kF32, tokens * experts), got = want;
          std::vector<int32_t> want_index(tokens * k);
          Buffer got_index = of_integers(want_index);
          const auto floats = [](void* data) { return static_cast<float*>(data); };
          ref_routes().topk_gate({}, floats(logits.data()), selects ? floats(select.data()) : nullptr, tokens, experts,
                                 k, floats(want.data()), want_index.data());
          OnDevice l(driver, logits), s(driver, select), p(driver, got), i(driver, got_index);
          routes->topk_gate({}, floats(l.data()), selects ? floats(s.data()) : nullptr, tokens, experts, k,
                            floats(p.data()), static_cast<int32_t*>(i.data()));
          p.fetch(), i.fetch();
          expect_no_error();
          const std::string where =
              std::to_string(tokens) + " x " + std::to_string(experts) + " k=" + std::to_string(k);
          for (size_t at = 0; at < got.size(); ++at)
            ASSERT_TRUE(std::isnan(want.get(at)) || std::abs(got.get(at) - want.get(at)) < 1e-6) << where;
          ASSERT_TRUE(got_index.canary_intact()) << where;
          for (size_t at = 0; at < want_index.size(); ++at)
            ASSERT_EQ(static_cast<const int32_t*>(got_index.data())[at], want_index[at]) << where;
        }
      }
    }
  }
}

TEST_F(CudaRoutesTest, RowsTravelAsInTheReference) {
  for (DType dtype : kDtypes) {
    for (size_t width : {1, 31, 32, 33, 257, 1000, 1024, 2056}) {
      for (size_t tokens : {0, 1, 33}) {
        for (size_t k : {1, 3}) {
          const size_t rows = tokens * k + 5;
          std::vector<int32_t> slot(tokens * k), index(rows, -1);
          for (size_t a = 0; a < slot.size(); ++a)
            slot[a] = a % 5 == 3 ? -1 : static_cast<int32_t>((a * 11 + 2) % rows);
          for (size_t a = slot.size(); a-- > 0;)
            if (slot[a] >= 0) index[slot[a]] = static_cast<int32_t>(a);
          Buffer slots = of_integers(slot), indices = of_integers(index), weight(DType::kF32, tokens * k);
          Buffer src(dtype, tokens * width, k), moved(dtype, rows * width), grad(dtype, tokens * width);
          src.randomize(1), moved.randomize(2), grad.randomize(4), weight.randomize(3);
          OnDevice s(driver, slots), i(driver, indices), w(driver, weight), from(driver, src), to(driver, moved),
              g(driver, grad);
          for (bool weighted : {false, true}) {
            Buffer there(dtype, rows * width), back(dtype, tokens * width), dots(DType::kF32, tokens * k);
            Buffer a = there, b = back, c = dots;
            const auto run = [&](const RouteKernels& kernels, const void* sources, const void* rests, const void* above,
                                 const void* at, const void* of, const void* factors, void* x, void* y, void* z) {
              const auto* weights = weighted ? static_cast<const float*>(factors) : nullptr;
              const auto* slots_at = static_cast<const int32_t*>(at);
              kernels.permute_rows({}, x, sources, dtype, width, rows, static_cast<const int32_t*>(of), weights, k);
              kernels.combine_rows({}, y, rests, dtype, width, tokens, k, slots_at, weights);
              kernels.dot_rows({}, static_cast<float*>(z), rests, above, dtype, width, tokens, k, slots_at);
            };
            run(ref_routes(), src.data(), moved.data(), grad.data(), slot.data(), index.data(), weight.data(),
                there.data(), back.data(), dots.data());
            OnDevice x(driver, a), y(driver, b), z(driver, c);
            run(*routes, from.data(), to.data(), g.data(), s.data(), i.data(), w.data(), x.data(), y.data(), z.data());
            x.fetch(), y.fetch(), z.fetch();
            expect_no_error();
            const std::string where = std::string(dtype_name(dtype)) + " " + std::to_string(width) + " x " +
                                      std::to_string(tokens) + " k=" + std::to_string(k);
            ASSERT_TRUE(same(a, there)) << where;
            ASSERT_TRUE(same(b, back)) << where;
            expect_near(c, dots, width, where);
          }
        }
      }
    }
  }
}

TEST_F(CudaRoutesTest, ProductsOfManyGroupsEqualTheReference) {
  const int64_t sizes[][3] = {{0, 5, 3}, {4, 3, 0}, {1, 1, 1}, {7, 17, 5}, {65, 33, 31}, {13, 65, 19}, {12, 32, 33}};
  for (DType dtype : kDtypes) {
    for (int form = 0; form < 4; ++form) {
      std::vector<Buffer> want, got;
      std::vector<std::unique_ptr<Buffer>> inputs;
      std::vector<std::unique_ptr<OnDevice>> copies;
      std::vector<GemmGroup> host, device;
      const auto put = [&](size_t n, int64_t seed) {
        inputs.push_back(std::make_unique<Buffer>(dtype, n, 1));
        inputs.back()->randomize(static_cast<unsigned>(seed));
        copies.push_back(std::make_unique<OnDevice>(driver, *inputs.back()));
      };
      const size_t count = cuda_runs_on_cpu() ? 14 : 70;  // 70: more than a launch takes
      for (size_t i = 0; i < count; ++i) {
        const auto& [m, n, k] = sizes[i % std::size(sizes)];
        put(m * k, m + 1), put(k * n, n + 2), put(n, k + 3);
        want.emplace_back(dtype, m * n), got.emplace_back(dtype, m * n);
      }
      for (size_t i = 0; i < count; ++i) {
        const auto& [m, n, k] = sizes[i % std::size(sizes)];
        copies.push_back(std::make_unique<OnDevice>(driver, got[i]));
        const bool biased = i % 2 == 0;
        host.push_back({inputs[3 * i]->data(), inputs[3 * i + 1]->data(), biased ? inputs[3 * i + 2]->data() : nullptr,
                        want[i].data(), m, n, k});
        device.push_back({copies[3 * i]->data(), copies[3 * i + 1]->data(),
                          biased ? copies[3 * i + 2]->data() : nullptr, copies.back()->data(), m, n, k});
      }
      const GemmForm how = {form % 2 == 1, form >= 2};
      ref_routes().grouped_gemm({}, host.data(), count, how, dtype);
      routes->grouped_gemm({}, device.data(), count, how, dtype);
      for (size_t i = 0; i < count; ++i) copies[3 * count + i]->fetch();
      expect_no_error();
      for (size_t i = 0; i < count; ++i)
        expect_near(got[i], want[i], static_cast<double>(host[i].k),
                    std::string(dtype_name(dtype)) + " form " + std::to_string(form) + " group " + std::to_string(i));
    }
  }
}

}  // namespace
}  // namespace ds::kernels::test
