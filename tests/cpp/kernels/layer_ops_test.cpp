// Operations of transformer layers: the reference against differences of fp64, every instruction set and CUDA against
// the reference.
#include "kernels/layer_ops.h"

#include <functional>

#include "device.h"

namespace ds::kernels::test {
namespace {

const LayerKernels* find_layers(const char* isa) { return ds_cpu_layer_kernels_isa(kLayerAbi, isa); }
const LayerKernels& ref_layers() { return *find_layers("ref"); }
auto isa_layers() { return of_each_isa(find_layers); }

constexpr Activation kActivations[] = {Activation::kGeluTanh, Activation::kGelu, Activation::kRelu, Activation::kSilu};
DType wide_of(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// One call of each entry, on rows of `size`. `options`: its bits choose among biases, residuals and forms.
struct LayerCase {
  DType dtype;
  size_t rows, size;
  unsigned options;

  bool has(unsigned bit) const { return (options >> bit & 1) != 0; }
  std::string text(const char* where) const {
    return std::string(where) + " " + dtype_name(dtype) + " " + std::to_string(rows) + " x " + std::to_string(size) +
           " options " + std::to_string(options);
  }
};

struct Layers {
  const LayerCase c;
  Buffer x, bias, residual, weight, shift, dy, wide_bias, wide_x;
  Buffer y, sum, without_sum, mean, scale, dx, from_result, dweight, dshift, parts, activated, slopes, dropped, turned,
      turned_back;
  Buffer positions;

  explicit Layers(const LayerCase& given)
      : c(given),
        x(c.dtype, c.rows * c.size, c.options % 3),
        bias(c.dtype, c.size),
        residual(c.dtype, c.rows * c.size),
        weight(c.dtype, c.size),
        shift(c.dtype, c.size),
        dy(c.dtype, c.rows * c.size, c.options % 2),
        wide_bias(c.dtype, across()),
        wide_x(c.dtype, c.rows * across()),
        y(c.dtype, c.rows * c.size),
        sum(c.dtype, c.rows * c.size),
        without_sum(c.dtype, c.rows * c.size),
        mean(wide_of(c.dtype), c.rows),
        scale(wide_of(c.dtype), c.rows),
        dx(c.dtype, c.rows * c.size),
        from_result(c.dtype, c.rows * c.size),
        dweight(wide_of(c.dtype), c.size),
        dshift(wide_of(c.dtype), c.size),
        parts(wide_of(c.dtype), kNormParts * 2 * c.size),
        activated(c.dtype, c.rows * c.size),
        slopes(c.dtype, c.rows * across()),
        dropped(c.dtype, c.rows * c.size),
        turned(c.dtype, c.rows * c.size),
        turned_back(c.dtype, c.rows * c.size),
        positions(DType::kF64, c.rows) {
    unsigned seed = c.options;
    for (Buffer* one : {&x, &bias, &residual, &shift, &dy, &wide_bias, &wide_x}) one->randomize(++seed);
    for (size_t i = 0; i < c.size; ++i) weight.set(i, (i % 2 == 0 ? 1 : -1) * (0.5 + 0.1 * static_cast<double>(i % 7)));
    for (size_t r = 0; r < c.rows; ++r)
      static_cast<int64_t*>(positions.data())[r] = static_cast<int64_t>(r * 37 % 4096);
  }

  size_t across() const { return c.has(0) ? 2 * c.size : c.size; }
  // Whole heads of at most 16 features.
  size_t heads() const { return c.size % 16 == 0 ? c.size / 16 : 1; }
  RotaryHeads rotary(const void* places, bool back) const {
    const size_t size = c.size / heads(), rotated = c.has(1) ? size / 2 / 2 * 2 : size / 2 * 2;
    const auto token = static_cast<int64_t>(c.size), head = static_cast<int64_t>(size);
    return {c.dtype, c.rows,   heads(), size, rotated, token, head, static_cast<const int64_t*>(places),
            10000.0, c.has(0), back};
  }
  RowDropout dropout() const { return {77, 1u << 30, c.has(2) ? 4.0f / 3 : 0.0f, 5}; }
  NormRows norm_rows() const { return {c.dtype, c.rows, c.size, c.has(0), 1e-5f}; }

  template <typename Place>
  void run(const LayerKernels& table, const Launch& launch, Place&& place) {
    const auto maybe = [&](Buffer& one, unsigned bit) { return c.has(bit) ? place.of(one) : nullptr; };
    void *in = place.of(x), *w = maybe(weight, 3), *b = maybe(shift, 3), *result = place.of(y);
    void *total = c.has(1) || c.has(2) ? place.of(sum) : nullptr, *middle = c.has(0) ? place.of(mean) : nullptr,
         *inverse = place.of(scale);
    void *added = maybe(bias, 1), *carried = maybe(residual, 2), *upper = place.of(dy);
    const NormInputs inputs = {in, added, carried, w, b};
    table.norm(launch, norm_rows(), inputs, {result, total, middle, inverse});
    table.norm(launch, norm_rows(), inputs, {place.of(without_sum), nullptr, nullptr, nullptr});
    const bool weights = c.has(1) || c.has(3);
    void *by_weight = weights ? place.of(dweight) : nullptr, *by_shift = weights ? place.of(dshift) : nullptr;
    table.norm_backward(launch, norm_rows(),
                        {upper, total != nullptr ? total : in, nullptr, w, b, middle, inverse, carried, place.of(dx),
                         by_weight, by_shift, weights ? place.of(parts) : nullptr});
    table.norm_backward(
        launch, norm_rows(),
        {upper, nullptr, result, w, b, middle, inverse, nullptr, place.of(from_result), nullptr, nullptr, nullptr});
    const ActivationRows rows = {c.dtype, c.rows, c.size, kActivations[c.options % 4], c.has(0)};
    void *gates = place.of(wide_x), *gate_bias = maybe(wide_bias, 4);
    table.activation(launch, rows, gates, gate_bias, place.of(activated));
    table.activation_backward(launch, rows, upper, gates, gate_bias, place.of(slopes));
    table.dropout(launch, dropout(), c.dtype, c.rows, c.size, in, added, carried, place.of(dropped));
    void *places = place.of(positions), *out = place.of(turned);
    table.rotary(launch, rotary(places, false), in, out);
    table.rotary(launch, rotary(places, true), out, place.of(turned_back));
  }

  // Names of results beside them.
  std::vector<std::pair<const char*, const Buffer*>> results() const {
    return {{"y", &y},
            {"sum", &sum},
            {"mean", &mean},
            {"scale", &scale},
            {"dx", &dx},
            {"dx of y", &from_result},
            {"dweight", &dweight},
            {"dshift", &dshift},
            {"act", &activated},
            {"slope", &slopes},
            {"dropout", &dropped},
            {"rotary", &turned},
            {"rotary back", &turned_back},
            {"y without sum", &without_sum}};
  }
};

void expect_near(const Layers& got, const Layers& want, const std::string& where) {
  const DType dtype = got.c.dtype;
  const double eps = dtype == DType::kF16 ? 2e-3 : dtype == DType::kBF16 ? 1.6e-2 : dtype == DType::kF32 ? 1e-5 : 1e-13;
  const auto all = got.results(), expected = want.results();
  for (size_t n = 0; n < all.size(); ++n) {
    const auto [name, buffer] = all[n];
    ASSERT_TRUE(buffer->canary_intact()) << where << " " << name;
    // A value that is computed back from a rounded one is off by its rounding times the largest weight's inverse.
    const double more = n == 5 ? 8 : n == 6 || n == 7 ? 1 + std::sqrt(static_cast<double>(got.c.rows)) / 8 : 1;
    for (size_t i = 0; i < buffer->size(); ++i) {
      const double x = buffer->get(i), y = expected[n].second->get(i);
      const double steep = n == 4 || n == 5 ? std::max(1.0, want.scale.get(i / got.c.size)) : 1;
      ASSERT_NEAR(x, y, more * steep * eps * (1 + std::abs(y))) << where << " " << name << " at " << i;
    }
  }
}

void each_case(bool small, const std::function<void(const LayerCase&)>& each) {
  unsigned options = 0;
  for (DType dtype : kDtypes)
    for (size_t rows : {size_t{1}, size_t{5}, size_t{70}})
      for (size_t size : {size_t{7}, size_t{16}, size_t{33}, size_t{130}, size_t{1000}})
        for (int turn = 0; turn < 3; ++turn) {
          options = (options + 11) % 32;
          if (!small || rows * size < 600) each({dtype, rows, size, options});
        }
}

TEST(LayerOpsTest, EveryIsaEqualsTheReferenceWithAnyNumberOfThreads) {
  ThreadPool two(2), five(5);
  each_case(false, [&](const LayerCase& c) {
    Layers want(c);
    want.run(ref_layers(), {}, OnHost());
    for (const auto& isa : isa_layers()) {
      Layers got(c), threaded(c), more(c);
      got.run(*isa.kernels, {}, OnHost());
      threaded.run(*isa.kernels, {&two}, OnHost());
      more.run(*isa.kernels, {&five}, OnHost());
      expect_near(got, want, c.text(isa.isa));
      const auto all = got.results(), other = threaded.results(), third = more.results();
      for (size_t n = 0; n < all.size(); ++n)
        ASSERT_TRUE(same(*other[n].second, *all[n].second) && same(*third[n].second, *all[n].second))
            << c.text(isa.isa) << " " << all[n].first << ": other bits with threads";
    }
  });
}

// The largest difference of `gradient` to differences of loss(), of steps in each element of `variable`.
double gap_of(Buffer& variable, const Buffer& gradient, const std::function<double()>& loss) {
  constexpr double kStep = 1e-6;
  double gap = 0;
  for (size_t i = 0; i < variable.size(); ++i) {
    const double here = variable.get(i);
    variable.set(i, here + kStep);
    const double above = loss();
    variable.set(i, here - kStep);
    const double below = loss();
    variable.set(i, here);
    gap = std::max(gap, std::abs((above - below) / (2 * kStep) - gradient.get(i)));
  }
  return gap;
}

TEST(LayerOpsTest, GradientsOfTheReferenceAreDifferences) {
  for (unsigned options = 0; options < 32; ++options) {
    Layers all({DType::kF64, 3, 12, options});
    all.run(ref_layers(), {}, OnHost());
    const Layers found = all;
    const auto loss_of = [&](const Buffer& out) {
      return [&] {
        all.run(ref_layers(), {}, OnHost());
        double loss = 0;
        for (size_t i = 0; i < out.size(); ++i) loss += out.get(i) * all.dy.get(i);
        return loss;
      };
    };
    Buffer dx = found.dx;
    if (all.c.has(2))
      for (size_t i = 0; i < dx.size(); ++i) dx.set(i, dx.get(i) - all.residual.get(i));  // `more`
    const std::string where = all.c.text("ref");
    EXPECT_LT(gap_of(all.x, dx, loss_of(all.y)), 1e-6) << where;
    if (all.c.has(3)) EXPECT_LT(gap_of(all.weight, found.dweight, loss_of(all.y)), 1e-6) << where;
    if (all.c.has(3)) EXPECT_LT(gap_of(all.shift, found.dshift, loss_of(all.y)), 1e-6) << where;
    for (size_t i = 0; i < dx.size(); ++i) EXPECT_NEAR(found.from_result.get(i), dx.get(i), 1e-9) << where;
    EXPECT_LT(gap_of(all.wide_x, found.slopes, loss_of(all.activated)), 2e-6) << where;
    for (size_t i = 0; i < all.x.size(); ++i) EXPECT_NEAR(found.turned_back.get(i), all.x.get(i), 1e-12) << where;
  }
}

TEST(LayerOpsTest, ByHand) {
  const double x[] = {1, 2, 3, 6};
  double y[4], scale, mean;
  ref_layers().norm({}, {DType::kF64, 1, 4, true, 0.5f}, {x, nullptr, nullptr, nullptr, nullptr},
                    {y, nullptr, &mean, &scale});
  EXPECT_EQ(mean, 3);
  EXPECT_NEAR(y[3], 3 / std::sqrt(3.5 + 0.5), 1e-12);
  ref_layers().norm({}, {DType::kF64, 1, 4, false, 0.5f}, {x, nullptr, nullptr, nullptr, nullptr},
                    {y, nullptr, nullptr, &scale});
  EXPECT_NEAR(y[1], 2 / std::sqrt(12.5 + 0.5), 1e-12);
  ref_layers().activation({}, {DType::kF64, 1, 2, Activation::kSilu, true}, x, nullptr, y);
  EXPECT_NEAR(y[1], 2 / (1 + std::exp(-2.0)) * 6, 1e-12);
  ref_layers().activation({}, {DType::kF64, 1, 4, Activation::kGelu, false}, x, nullptr, y);
  EXPECT_NEAR(y[0], 0.8413447460685429, 1e-12);
  const int64_t position = 1;
  ref_layers().rotary({}, {DType::kF64, 1, 1, 4, 2, 4, 4, &position, 10000.0, false, false}, x, y);
  EXPECT_NEAR(y[0], std::cos(1.0) - 2 * std::sin(1.0), 1e-12);
  EXPECT_EQ(y[3], 6);
}

TEST(LayerOpsTest, NansStayAndLargeValuesSaturate) {
  for (const auto& isa : isa_layers()) {
    for (Activation kind : kActivations) {
      float x[] = {NAN, 100, -100, 0, INFINITY, 20, -20, 1e-8f}, y[8], dx[8];
      const float dy[] = {1, 1, 1, 1, 1, 1, 1, 1};
      isa.kernels->activation({}, {DType::kF32, 1, 8, kind, false}, x, nullptr, y);
      isa.kernels->activation_backward({}, {DType::kF32, 1, 8, kind, false}, dy, x, nullptr, dx);
      EXPECT_TRUE(std::isnan(y[0])) << isa.isa;
      EXPECT_EQ(y[1], 100) << isa.isa;
      EXPECT_NEAR(y[2], 0, 1e-6) << isa.isa;
      EXPECT_EQ(y[3], 0) << isa.isa;
      EXPECT_EQ(y[4], INFINITY) << isa.isa;
      EXPECT_EQ(dx[1], 1) << isa.isa;
      EXPECT_NEAR(dx[2], 0, 1e-6) << isa.isa;
    }
  }
}

TEST(LayerOpsTest, DropoutKeepsTheShareAndItsBits) {
  const size_t rows = 200, size = 1000;
  std::vector<float> x(rows * size, 1.0f), y(x.size()), again(x.size());
  const RowDropout how = {9, static_cast<uint32_t>(0.1 * 4294967296.0), static_cast<float>(1 / 0.9), 0};
  ThreadPool pool(3);
  ref_layers().dropout({}, how, DType::kF32, rows, size, x.data(), nullptr, nullptr, y.data());
  for (const auto& isa : isa_layers()) {
    isa.kernels->dropout({&pool}, how, DType::kF32, rows, size, x.data(), nullptr, nullptr, again.data());
    EXPECT_EQ(y, again) << isa.isa;
  }
  double kept = 0;
  for (float one : y) kept += one != 0;
  const double n = static_cast<double>(x.size());
  EXPECT_NEAR(kept / n, 0.9, 4 * std::sqrt(0.09 / n));
}

TEST(LayerOpsTest, TheTableOfADeviceIsFound) {
  EXPECT_EQ(ds_layer_kernels(kLayerAbi, "cpu"), find_layers(ds_cpu_kernels(kKernelAbi)->isa));
  EXPECT_EQ(ds_layer_kernels(kLayerAbi + 1, "cpu"), nullptr);
  EXPECT_EQ(ds_layer_kernels(kLayerAbi, "abacus"), nullptr);
}

using CudaLayerOpsTest = CudaTest;
TEST_F(CudaLayerOpsTest, EqualsTheReference) {
  const LayerKernels* cuda = ds_layer_kernels(kLayerAbi, "cuda");
  ASSERT_NE(cuda, nullptr);
  each_case(cuda_runs_on_cpu(), [&](const LayerCase& c) {
    Layers want(c), got(c);
    want.run(ref_layers(), {}, OnHost());
    got.run(*cuda, {}, OnCuda(driver));
    expect_near(got, want, c.text("cuda"));
  });
  expect_no_error();
}

}  // namespace
}  // namespace ds::kernels::test
