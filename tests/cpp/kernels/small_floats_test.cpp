// Small floats: the reference against values by hand, every instruction set and CUDA against the bytes of the
// reference.
#include "kernels/codes.h"

#include "device.h"

namespace ds::kernels::test {
namespace {

const CodeKernels* find_codes(const char* isa) { return ds_cpu_code_kernels_isa(kCodesAbi, isa); }
const CodeKernels& ref_codes() { return *find_codes("ref"); }
auto isa_codes() { return of_each_isa(find_codes); }

template <typename Each>
void each_float_case(const Each& each) {
  for (const auto& [exponent, mantissa] : {std::pair{2, 1}, {3, 2}, {4, 3}, {4, 7}})
    for (size_t group : {size_t{4}, size_t{60}, size_t{512}})
      for (bool stochastic : {false, true})
        for (DType dtype : kFloats) each(FloatCode{exponent, mantissa, group, stochastic, 5}, dtype);
}

struct SmallFloats {
  const FloatCode code;
  const size_t groups;
  Buffer values, rows, back;
  SmallFloats(const FloatCode& code, DType dtype, size_t groups)
      : code(code),
        groups(groups),
        values(dtype, groups * code.group, code.group % 3),
        rows(byte_buffer(groups * float_row(code))),
        back(dtype, groups * code.group) {
    values.randomize(static_cast<unsigned>(code.group), 3);
    for (size_t i = 0; i < code.group; ++i) values.set(i, 0);
    values.set(2 * code.group, NAN), values.set(3 * code.group + 1, -INFINITY), values.set(4 * code.group, 1e-45);
    for (size_t i = 0; i < code.group; ++i)  // ties, subnormal numbers and the largest one
      values.set(5 * code.group + i, i == 0 ? std::ldexp(2 - std::ldexp(1.0, -code.mantissa), 1 << (code.exponent - 1))
                                            : (i % 2 != 0 ? -1 : 1) * static_cast<double>(i) / 64);
  }
  template <typename Place>
  void run(const CodeKernels& codes, const Launch& launch, Place&& place) {
    auto* bytes = static_cast<uint8_t*>(place.of(rows));
    codes.encode_floats(launch, code, values.dtype(), place.of(values), groups, bytes);
    codes.decode_floats(launch, code, bytes, groups, values.dtype(), place.of(back));
  }
  void expect_equal(const SmallFloats& want, const char* where) const {
    const std::string text = std::string(where) + " e" + std::to_string(code.exponent) + "m" +
                             std::to_string(code.mantissa) + " " + dtype_name(values.dtype()) +
                             (code.stochastic ? " stochastic" : "");
    ASSERT_TRUE(equal_bytes(rows, want.rows)) << text;
    ASSERT_TRUE(back.canary_intact() && same(back, want.back)) << text;
  }
};

TEST(SmallFloatTest, EveryTableGivesTheBytesOfTheReference) {
  ThreadPool pool(3);
  each_float_case([&](const FloatCode& code, DType dtype) {
    SmallFloats want(code, dtype, 70);
    want.run(ref_codes(), {}, OnHost());
    for (const auto& isa : isa_codes()) {
      SmallFloats got(code, dtype, 70);
      got.run(*isa.kernels, {&pool}, OnHost());
      got.expect_equal(want, isa.isa);
    }
    for (size_t i = 0; i < code.group; ++i) {
      EXPECT_EQ(want.back.get(i), 0);
      EXPECT_TRUE(std::isnan(want.back.get(2 * code.group + i)) && std::isnan(want.back.get(3 * code.group + i)));
    }
  });
}

TEST(SmallFloatTest, ByHand) {
  const float x[] = {6, -1, 0.2f, 0.3f, 2.5f, 3.5f, -0.26f, 5};
  float back[8];
  uint8_t rows[8];
  const FloatCode code = {2, 1, 8, false, 0};  // 0, 0.5, 1, 1.5, 2, 3, 4, 6
  ref_codes().encode_floats({}, code, DType::kF32, x, 1, rows);
  ref_codes().decode_floats({}, code, rows, 1, DType::kF32, back);
  EXPECT_EQ(std::vector<float>(back, back + 8), (std::vector<float>{6, -1, 0, 0.5f, 2, 4, -0.5f, 4}));
  EXPECT_EQ(rows[0], 0xa7);  // -1: 1 01 0, 6: 0 11 1
}

TEST(SmallFloatTest, StochasticRoundingKeepsTheMean) {
  for (double value : {0.3, 0.01}) {  // between normal numbers, and between subnormal ones
    std::vector<float> x(40000, static_cast<float>(value)), back(x.size());
    const FloatCode code = {4, 3, x.size(), true, 3};
    x[0] = 480;  // so that the scale is 1
    std::vector<uint8_t> rows(float_row(code));
    ref_codes().encode_floats({}, code, DType::kF32, x.data(), 1, rows.data());
    ref_codes().decode_floats({}, code, rows.data(), 1, DType::kF32, back.data());
    double sum = 0;
    for (size_t i = 1; i < x.size(); ++i) sum += back[i];
    EXPECT_NEAR(sum / static_cast<double>(x.size() - 1), value, 4 * 0.0313 / 2 / 200);
  }
}

using CudaSmallFloatTest = CudaTest;
TEST_F(CudaSmallFloatTest, EqualsTheReference) {
  each_float_case([&](const FloatCode& code, DType dtype) {
    const size_t groups = cuda_runs_on_cpu() ? 6 : 300;
    if (cuda_runs_on_cpu() && code.group > 100 && dtype != DType::kF32) return;  // which takes long
    SmallFloats want(code, dtype, groups), got(code, dtype, groups);
    want.run(ref_codes(), {}, OnHost());
    got.run(*ds_code_kernels(kCodesAbi, "cuda"), {}, OnCuda(driver));
    got.expect_equal(want, "cuda");
  });
  expect_no_error();
}

}  // namespace
}  // namespace ds::kernels::test
