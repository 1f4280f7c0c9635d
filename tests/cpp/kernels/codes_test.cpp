// Codes of signs and of blocks: the reference against bytes by hand and its promises, every instruction set and the GPU
// against the reference.
#include "kernels/codes.h"

#include <deque>

#include "device.h"

namespace ds::kernels::test {
namespace {

const CodeKernels* find_codes(const char* isa) { return ds_cpu_code_kernels_isa(kCodesAbi, isa); }
const CodeKernels& ref_codes() { return *find_codes("ref"); }
auto isa_codes() { return of_each_isa(find_codes); }

// ---- one call of each entry, with a run for each size, in the memory of a place ----
struct Signs {
  std::vector<Buffer> values, error, bits, scale, sums;
  bool with_error;

  Signs(const std::vector<size_t>& sizes, bool with_error) : with_error(with_error) {
    for (size_t n : sizes) {
      const size_t at = values.size() % 3;
      values.emplace_back(DType::kF32, n, at).randomize(static_cast<unsigned>(n)).add_specials();
      error.emplace_back(DType::kF32, n, at == 2 ? 1 : at).randomize(static_cast<unsigned>(n) + 9);
      bits.push_back(byte_buffer((n + 7) / 8));
      scale.emplace_back(DType::kF32, 1).set(0, 0.7 + static_cast<double>(n % 5));
      sums.emplace_back(DType::kF64, 1).set(0, 0.5);
    }
  }
  template <typename Place>
  void encode(const CodeKernels& codes, const Launch& launch, Place&& place) {
    std::vector<SignRun> runs;
    for (size_t i = 0; i < values.size(); ++i)
      runs.push_back({static_cast<float*>(place.of(values[i])),
                      with_error ? static_cast<float*>(place.of(error[i])) : nullptr, values[i].size(),
                      static_cast<uint8_t*>(place.of(bits[i])), static_cast<float*>(place.of(scale[i]))});
    codes.encode_signs(launch, runs.data(), runs.size());
  }
  template <typename Place>
  void sum(const CodeKernels& codes, const Launch& launch, Place&& place) {
    std::vector<ErrorSum> runs;
    for (size_t i = 0; i < values.size(); ++i)
      runs.push_back({static_cast<float*>(place.of(values[i])),
                      with_error ? static_cast<float*>(place.of(error[i])) : nullptr, values[i].size(),
                      static_cast<double*>(place.of(sums[i]))});
    for (size_t i = 1; i < runs.size(); i += 2) runs[i].sum = runs[i - 1].sum;  // two runs share a sum
    codes.sum_squares_with_error(launch, runs.data(), runs.size());
  }
  void expect_equal(const Signs& want, const std::string& where) const {
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(equal_bytes(bits[i], want.bits[i])) << where << " n=" << values[i].size();
      EXPECT_TRUE(same(error[i], want.error[i])) << where << " n=" << values[i].size();
      EXPECT_TRUE(same(sums[i], want.sums[i])) << where << " n=" << values[i].size();
    }
  }
};

struct SignParts {
  std::vector<Buffer> out, rows;
  size_t parts;

  // A part is its bits, up to a multiple of 4, then its scale.
  static size_t stride(size_t n) { return (n + 31) / 32 * 4 + 4; }
  SignParts(const std::vector<size_t>& sizes, size_t parts) : parts(parts) {
    for (size_t n : sizes) {
      out.emplace_back(DType::kF32, n, out.size() % 3);
      rows.push_back(byte_buffer(parts * stride(n)));
      fill_with(rows.back(), static_cast<unsigned>(n));
      for (size_t p = 0; p < parts; ++p) {
        const float scale = 0.3f + static_cast<float>(p);
        std::memcpy(static_cast<uint8_t*>(rows.back().data()) + (p + 1) * stride(n) - 4, &scale, 4);
      }
    }
  }
  template <typename Place>
  void decode(const CodeKernels& codes, const Launch& launch, Place&& place) {
    std::vector<SignSum> runs;
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t n = out[i].size();
      auto* row = static_cast<uint8_t*>(place.of(rows[i]));
      runs.push_back({static_cast<float*>(place.of(out[i])), n, row, reinterpret_cast<float*>(row + stride(n) - 4),
                      parts, stride(n)});
    }
    codes.decode_signs(launch, runs.data(), runs.size(), 0.3f);
  }
};

struct Blocks {
  BlockCode code;
  std::vector<Buffer> values, error, codes, scales, offsets;
  bool with_error;

  Blocks(BlockCode code, DType dtype, const std::vector<size_t>& sizes, bool with_error, double size, bool specials)
      : code(code), with_error(with_error) {
    for (size_t n : sizes) {
      const size_t at = values.size() % 3;
      values.emplace_back(dtype, n, at).randomize(static_cast<unsigned>(n), size);
      error.emplace_back(DType::kF32, n, at == 2 ? 1 : at).randomize(static_cast<unsigned>(n) + 9, size / 9);
      if (specials) values.back().add_specials();
      for (size_t i = n / 2; i < n && i < n / 2 + 2 * code.group; ++i) values.back().set(i, i % 2 == 0 ? 0.0 : -0.0);
      codes.push_back(byte_buffer(code_bytes(code, n), at));
      scales.push_back(byte_buffer(scale_bytes(code, n)));
      offsets.push_back(byte_buffer(scale_bytes(code, n)));
    }
  }
  template <typename Place>
  void encode(const CodeKernels& kernels, const Launch& launch, Place&& place) {
    std::vector<BlockRun> runs;
    for (size_t i = 0; i < values.size(); ++i)
      runs.push_back({place.of(values[i]), values[i].size(), static_cast<uint8_t*>(place.of(codes[i])),
                      place.of(scales[i]), code.offset ? place.of(offsets[i]) : nullptr,
                      with_error ? static_cast<float*>(place.of(error[i])) : nullptr, i % 2 == 0 ? 0.0f : 0.8f});
    kernels.encode_blocks(launch, code, values[0].dtype(), runs.data(), runs.size());
  }
  void expect_equal(const Blocks& want, const std::string& where) const {
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(equal_bytes(codes[i], want.codes[i])) << "codes " << where << " n=" << values[i].size();
      EXPECT_TRUE(equal_bytes(scales[i], want.scales[i])) << "scales " << where << " n=" << values[i].size();
      EXPECT_TRUE(equal_bytes(offsets[i], want.offsets[i])) << "offsets " << where << " n=" << values[i].size();
      EXPECT_TRUE(same(error[i], want.error[i])) << "error " << where << " n=" << values[i].size();
    }
  }
  // The decoded values of run number i; one part, in fp32.
  std::vector<float> decoded(size_t i) const {
    std::vector<float> out(values[i].size());
    const BlockSum run = {
        out.data(), out.size(), static_cast<const uint8_t*>(codes[i].data()), scales[i].data(), offsets[i].data(),
        1,          0};
    ref_codes().decode_blocks({}, code, DType::kF32, &run, 1, 1, false);
    return out;
  }
};

struct BlockParts {
  BlockCode code;
  std::vector<Buffer> out, rows;
  size_t parts;

  // A part is its scales, its offsets and its codes, up to a multiple of 4.
  size_t stride(size_t n) const { return (2 * scale_bytes(code, n) + code_bytes(code, n) + 3) / 4 * 4; }
  BlockParts(BlockCode code, DType dtype, const std::vector<size_t>& sizes, size_t parts) : code(code), parts(parts) {
    for (size_t n : sizes) {
      out.emplace_back(dtype, n, out.size() % 3).randomize(static_cast<unsigned>(n));
      rows.push_back(byte_buffer(parts * stride(n)));
      fill_with(rows.back(), static_cast<unsigned>(n));
      const size_t groups = 2 * block_groups(code, n);
      for (size_t p = 0; p < parts; ++p) {
        for (size_t g = 0; g < groups; ++g) {
          auto* at = static_cast<char*>(rows.back().data()) + p * stride(n);
          const float scale = g % 7 == 3 ? NAN : 0.01f * static_cast<float>(g % 13) - (g >= groups / 2 ? 0.04f : 0.0f);
          const Bf16 narrow = to_bf16(scale);
          if (code.scale == DType::kBF16) std::memcpy(at + 2 * g, &narrow, 2);
          if (code.scale == DType::kF32) std::memcpy(at + 4 * g, &scale, 4);
        }
      }
    }
  }
  template <typename Place>
  void decode(const CodeKernels& codes, const Launch& launch, bool add, Place&& place) {
    std::vector<BlockSum> runs;
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t n = out[i].size(), scales = scale_bytes(code, n);
      auto* row = static_cast<uint8_t*>(place.of(rows[i]));
      runs.push_back(
          {place.of(out[i]), n, row + 2 * scales, row, code.offset ? row + scales : nullptr, parts, stride(n)});
    }
    codes.decode_blocks(launch, code, out[0].dtype(), runs.data(), runs.size(), 0.7f, add);
  }
};

template <typename Case>
void expect_same_outputs(const Case& got, const Case& want, const std::string& where) {
  for (size_t i = 0; i < got.out.size(); ++i)
    EXPECT_TRUE(same(got.out[i], want.out[i])) << where << " n=" << got.out[i].size();
}

std::string text_of(const BlockCode& code, DType dtype, bool error) {
  return std::to_string(code.bits) + " bits, groups of " + std::to_string(code.group) + ", " + dtype_name(code.scale) +
         (code.offset ? " with offset" : "") + ", of " + dtype_name(dtype) + (error ? " with error" : "");
}

// Calls body(code, dtype, error) for all of them; of groups there is another one each time.
template <typename Body>
void each_block_case(const Body& body) {
  constexpr size_t kGroups[] = {256, 32, 6, 1000};
  size_t number = 0;
  for (int bits : {4, 8})
    for (DType scale : {DType::kBF16, DType::kF32})
      for (bool offset : {false, true})
        for (bool error : {false, true})
          for (DType dtype : kFloats)
            for (size_t k = 0; k < 2; ++k) {
              const size_t group = k == 0 ? 256 : kGroups[++number % 4];
              body(BlockCode{bits, group, scale, offset}, dtype, error);
            }
}

TEST(CodesTest, SignsByHand) {
  const float values[] = {1, -1, 0, -0.0f, -2, 3, NAN, 0.5f, -1, 7};
  float error[] = {0, 0, 0, 0, 2.5f, -4, 0, 0, 1, 0}, scale = 2;
  uint8_t bits[3] = {7, 7, 7};
  const SignRun run = {values, error, 10, bits, &scale};
  ref_codes().encode_signs({}, &run, 1);
  EXPECT_EQ(std::vector<uint8_t>(bits, bits + 3), (std::vector<uint8_t>{0b10111001, 0b11000000, 7}));
  const float left[] = {-1, 1, -2, -2, -1.5f, 1, NAN, -1.5f, -2, 5};
  for (int i = 0; i < 10; ++i)
    EXPECT_TRUE(error[i] == left[i] || (std::isnan(error[i]) && std::isnan(left[i]))) << i << ": " << error[i];
}

TEST(CodesTest, SignsOfSeveralPartsAreAddedUp) {
  struct Part {
    uint8_t bits[4];
    float scale;
  } parts[3] = {{{0b10100000}, 1}, {{0b11000000}, 10}, {{0b01000000}, 100}};
  float out[4];
  const SignSum run = {out, 4, parts[0].bits, &parts[0].scale, 3, sizeof(Part)};
  ref_codes().decode_signs({}, &run, 1, 0.5f);
  EXPECT_EQ(std::vector<float>(out, out + 4), (std::vector<float>{-44.5f, 54.5f, -54.5f, -55.5f}));
}

TEST(CodesTest, SquaresWithErrorAreThoseOfTheSum) {
  for (size_t n : kSizes) {
    Buffer values(DType::kF32, n), error(DType::kF32, n), both(DType::kF32, n);
    values.randomize(1), error.randomize(2);
    for (size_t i = 0; i < n; ++i) both.set(i, static_cast<float>(values.get(i)) + static_cast<float>(error.get(i)));
    double got[2] = {3, 4}, want[2] = {3, 4};
    const ErrorSum runs[] = {{static_cast<float*>(values.data()), static_cast<float*>(error.data()), n, got},
                             {static_cast<float*>(both.data()), nullptr, n, got + 1}};
    ref_codes().sum_squares_with_error({}, runs, 2);
    const Segment all = {both.data(), n};
    for (double& sum : want) ref_table().sum_squares({}, &all, 1, DType::kF32, &sum);
    EXPECT_EQ(std::memcmp(got, want, sizeof got), 0) << n;
  }
}

TEST(CodesTest, BlocksByHand) {
  const float values[] = {7, -3.5f, 0.5f, 1.5f, -7, 2.25f, 4};  // two groups of 4: scales 1 and 1
  uint8_t codes[5] = {9, 9, 9, 9, 9};
  float scales[3] = {9, 9, 9};
  const BlockCode code = {4, 4, DType::kF32, false};
  const BlockRun run = {values, 7, codes, scales, nullptr, nullptr, 0};
  ref_codes().encode_blocks({}, code, DType::kF32, &run, 1);
  EXPECT_EQ(scales[0], 1);
  EXPECT_EQ(scales[1], 1);
  EXPECT_EQ(scales[2], 9);
  // 7, -4 (ties to even), 0, 2; -7, 2, 4
  EXPECT_EQ(std::vector<uint8_t>(codes, codes + 5), (std::vector<uint8_t>{0xc7, 0x20, 0x29, 0x04, 9}));
  float out[7];
  const BlockSum sum = {out, 7, codes, scales, nullptr, 1, 0};
  ref_codes().decode_blocks({}, code, DType::kF32, &sum, 1, 1, false);
  EXPECT_EQ(std::vector<float>(out, out + 7), (std::vector<float>{7, -4, 0, 2, -7, 2, 4}));
}

TEST(CodesTest, OffsetsByHand) {
  const float values[] = {-1, 254, 0.4f, 10};  // from -1, in steps of 1
  uint8_t codes[4];
  float scale = 0, offset = 0, out[4];
  const BlockCode code = {8, 4, DType::kF32, true};
  const BlockRun run = {values, 4, codes, &scale, &offset, nullptr, 0};
  ref_codes().encode_blocks({}, code, DType::kF32, &run, 1);
  EXPECT_EQ(scale, 1);
  EXPECT_EQ(offset, -1);
  EXPECT_EQ(std::vector<uint8_t>(codes, codes + 4), (std::vector<uint8_t>{0, 255, 1, 11}));
  const BlockSum sum = {out, 4, codes, &scale, &offset, 1, 0};
  ref_codes().decode_blocks({}, code, DType::kF32, &sum, 1, 2, false);
  EXPECT_EQ(std::vector<float>(out, out + 4), (std::vector<float>{-2, 508, 0, 20}));
}

TEST(CodesTest, SignsOfEveryIsaAreThoseOfTheReference) {
  ThreadPool pool(3);
  const std::vector<size_t> sizes(std::begin(kSizes), std::end(kSizes));
  for (const auto& isa : isa_codes()) {
    for (bool error : {false, true}) {
      Signs want(sizes, error), got = want;
      want.sum(ref_codes(), {}, OnHost());
      want.encode(ref_codes(), {}, OnHost());
      got.sum(*isa.kernels, {&pool}, OnHost());
      got.encode(*isa.kernels, {&pool}, OnHost());
      got.expect_equal(want, isa.isa);
    }
    for (size_t parts : {1, 2, 5}) {
      SignParts want(sizes, parts), got = want;
      want.decode(ref_codes(), {}, OnHost());
      got.decode(*isa.kernels, {&pool}, OnHost());
      expect_same_outputs(got, want, std::string(isa.isa) + " parts=" + std::to_string(parts));
    }
  }
}

TEST(CodesTest, BlocksOfEveryIsaAreThoseOfTheReference) {
  ThreadPool pool(3);
  const std::vector<size_t> sizes(std::begin(kSizes), std::end(kSizes));
  each_block_case([&](BlockCode code, DType dtype, bool error) {
    for (double size : {1.0, error ? 1e-39 : 1e38}) {
      Blocks want(code, dtype, sizes, error, size, size == 1);
      const Blocks given = want;
      want.encode(ref_codes(), {}, OnHost());
      for (const auto& isa : isa_codes()) {
        Blocks got = given;
        got.encode(*isa.kernels, {&pool}, OnHost());
        got.expect_equal(want, std::string(isa.isa) + " " + text_of(code, dtype, error));
      }
    }
    for (size_t parts : {1, 2, 4}) {
      BlockParts want(code, dtype, sizes, parts);
      const BlockParts given = want;
      want.decode(ref_codes(), {}, error, OnHost());
      for (const auto& isa : isa_codes()) {
        BlockParts got = given;
        got.decode(*isa.kernels, {&pool}, error, OnHost());
        expect_same_outputs(got, want, std::string(isa.isa) + " " + text_of(code, dtype, error));
      }
    }
  });
}

// No element is clipped, a decoded one is off by half a scale at most (and what fp32 rounds), and what is lost is kept.
TEST(CodesTest, BlocksKeepTheirPromise) {
  each_block_case([&](BlockCode code, DType dtype, bool error) {
    for (double size : {1.0, 1e-6, 3e-38, 1e30}) {
      Blocks all(code, dtype, {1, 33, 256, 1000, 5001}, error, size, false);
      const Blocks given = all;
      all.encode(ref_codes(), {}, OnHost());
      for (size_t i = 0; i < all.values.size(); ++i) {
        const std::vector<float> back = all.decoded(i);
        const auto* of_bf16 = static_cast<const Bf16*>(all.scales[i].data());
        const auto* of_fp32 = static_cast<const float*>(all.scales[i].data());
        for (size_t k = 0; k < back.size(); ++k) {
          const size_t g = k / code.group;
          const double scale = code.scale == DType::kBF16 ? to_float(of_bf16[g]) : of_fp32[g];
          const double value = given.values[i].get(k), old = given.error[i].get(k);
          const double x = error ? static_cast<float>(value) + static_cast<float>(old) : value;
          if (!std::isfinite(x) || std::isnan(scale)) continue;
          const double slack = 1e-6 * (std::abs(x) + scale) * (code.offset ? 300 : 1) + 4e-45;
          ASSERT_LE(std::abs(back[k] - x), scale / 2 + slack) << text_of(code, dtype, error) << " at " << k;
          if (!error) continue;
          const double beta = i % 2 == 0 ? 0.0 : 0.8f, kept = beta * old + (1 - beta) * (x - back[k]);
          ASSERT_NEAR(all.error[i].get(k), kept, slack) << text_of(code, dtype, error) << " at " << k;
        }
      }
    }
  });
}

TEST(CodesTest, AGroupThatIsNotFiniteComesBackAsNanAndKeepsItsErrors) {
  for (bool offset : {false, true}) {
    for (int bits : {4, 8}) {
      for (double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
        Blocks one({bits, 32, DType::kBF16, offset}, DType::kF16, {100}, true, 1, false);
        for (size_t i = 0; i < 100; ++i) one.values[0].set(i, static_cast<double>(i));
        one.values[0].set(40, bad);
        const Buffer before = one.error[0];
        one.encode(ref_codes(), {}, OnHost());
        const std::vector<float> back = one.decoded(0);
        for (size_t i = 0; i < 100; ++i) {
          EXPECT_EQ(std::isnan(back[i]), i / 32 == 1) << i;
          if (i / 32 == 1) {
            EXPECT_EQ(one.error[0].get(i), before.get(i));
          }
        }
        EXPECT_EQ(static_cast<const uint16_t*>(one.scales[0].data())[1], 0x7fc0);
      }
    }
  }
}

// Signs sent, and what is left of them, are what was to be sent.
TEST(CodesTest, SignsAndTheirErrorsAreTheValues) {
  Signs all({1, 7, 9, 100, 1001}, true);
  for (Buffer& values : all.values) values.randomize(3);
  const Signs given = all;
  all.encode(ref_codes(), {}, OnHost());
  for (size_t i = 0; i < all.values.size(); ++i) {
    std::vector<float> sent(all.values[i].size());
    const SignSum run = {sent.data(),
                         sent.size(),
                         static_cast<uint8_t*>(all.bits[i].data()),
                         static_cast<float*>(all.scale[i].data()),
                         1,
                         0};
    ref_codes().decode_signs({}, &run, 1, 1);
    for (size_t k = 0; k < sent.size(); ++k)
      EXPECT_NEAR(sent[k] + all.error[i].get(k), given.values[i].get(k) + given.error[i].get(k), 1e-6);
  }
}

// ---- fake quantization ----
template <typename Each>
void each_fake_case(const Each& each) {
  for (int bits : {1, 3, 8})
    for (size_t group : {size_t{1}, size_t{7}, size_t{64}, size_t{20000}})
      for (bool offset : {false, true})
        for (bool stochastic : {false, true})
          for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16})
            each(FakeQuant{bits, group, offset, stochastic, 77}, dtype, group > 1000 ? size_t{50001} : size_t{333});
}
std::string text_of(const FakeQuant& how, DType dtype, const char* where) {
  return std::string(where) + " " + dtype_name(dtype) + " bits " + std::to_string(how.bits) + " group " +
         std::to_string(how.group) + (how.offset ? " offset" : "") + (how.stochastic ? " stochastic" : "");
}
Buffer fake_values(const FakeQuant& how, DType dtype, size_t numel) {
  Buffer values(dtype, numel, how.group % 3);
  values.randomize(static_cast<unsigned>(how.bits));
  values.set(3, -0.0);
  if (how.group == 64) values.set(70, NAN), values.set(200, INFINITY);
  return values;
}

TEST(FakeQuantTest, ByHand) {
  std::vector<float> x = {0.5f, -1.0f, 0.24f, 1.0f, 3.0f, 3.0f};
  const float step = (2 + 1e-5f) / 8, other = (6 + 1e-5f) / 8;
  ref_codes().fake_quant({}, {3, 4, false, false, 0}, DType::kF32, x.data(), x.size());
  EXPECT_EQ(x, (std::vector<float>{2 * step, -4 * step, step, 3 * step, 3 * other, 3 * other}));
  x = {0.0f, 1.0f, 0.4f, 0.6f};
  ref_codes().fake_quant({}, {1, 4, true, false, 0}, DType::kF32, x.data(), x.size());
  const float half = (1 + 1e-5f) / 2;
  EXPECT_EQ(x, (std::vector<float>{0, half, half, half}));
}

TEST(FakeQuantTest, EveryIsaGivesTheBitsOfTheReference) {
  ThreadPool pool(3);
  each_fake_case([&](const FakeQuant& how, DType dtype, size_t numel) {
    Buffer want = fake_values(how, dtype, numel);
    ref_codes().fake_quant({}, how, dtype, want.data(), numel);
    for (const auto& isa : isa_codes()) {
      Buffer got = fake_values(how, dtype, numel);
      isa.kernels->fake_quant({&pool}, how, dtype, got.data(), numel);
      ASSERT_TRUE(got.canary_intact() && same(got, want)) << text_of(how, dtype, isa.isa);
    }
    for (size_t i = 64; how.group == 64 && i < 256; ++i) EXPECT_EQ(std::isnan(want.get(i)), i < 128 || i >= 192) << i;
  });
}

TEST(FakeQuantTest, StochasticRoundingKeepsTheMean) {
  const size_t numel = 40000;
  std::vector<float> x(numel, 0.3f);
  x[0] = 1;
  ref_codes().fake_quant({}, {4, numel, false, true, 5}, DType::kF32, x.data(), numel);
  double sum = 0;
  for (size_t i = 1; i < numel; ++i) sum += x[i];
  const double step = 2.0 / 16, deviation = step / 2 / std::sqrt(static_cast<double>(numel));
  EXPECT_NEAR(sum / (numel - 1), 0.3, 4 * deviation);
}

class CudaCodesTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    codes = ds_code_kernels(kCodesAbi, "cuda");
    ASSERT_NE(codes, nullptr);
    // More runs than one launch takes.
    sizes_ = sizes();
    for (size_t i = 0; i < 130; ++i) sizes_.push_back(i % 3);
  }
  const CodeKernels* codes = nullptr;
  std::vector<size_t> sizes_;
};

TEST_F(CudaCodesTest, SignsAreThoseOfTheReference) {
  for (bool error : {false, true}) {
    Signs want(sizes_, error), got = want;
    want.sum(ref_codes(), {}, OnHost());
    want.encode(ref_codes(), {}, OnHost());
    {
      DriverScratch scratch(driver);
      OnCuda place(driver);
      got.sum(*codes, {nullptr, nullptr, &scratch}, place);
    }
    got.encode(*codes, {}, OnCuda(driver));
    got.expect_equal(want, "cuda");
  }
  for (size_t parts : {1, 3}) {
    SignParts want(sizes_, parts), got = want;
    want.decode(ref_codes(), {}, OnHost());
    got.decode(*codes, {}, OnCuda(driver));
    expect_same_outputs(got, want, "cuda");
  }
  expect_no_error();
}

TEST_F(CudaCodesTest, FakeQuantizationGivesTheBitsOfTheReference) {
  size_t number = 0;
  each_fake_case([&](const FakeQuant& how, DType dtype, size_t numel) {
    if (cuda_runs_on_cpu() && ++number % 4 != 0) return;  // which takes long
    Buffer want = fake_values(how, dtype, numel), got = want;
    ref_codes().fake_quant({}, how, dtype, want.data(), numel);
    {
      OnDevice there(driver, got);
      DriverScratch scratch(driver);
      codes->fake_quant({nullptr, nullptr, &scratch}, how, dtype, there.data(), numel);
      there.fetch();
    }
    ASSERT_TRUE(got.canary_intact() && same(got, want)) << text_of(how, dtype, "cuda");
  });
  expect_no_error();
}

TEST_F(CudaCodesTest, BlocksAreThoseOfTheReference) {
  size_t number = 0;
  each_block_case([&](BlockCode code, DType dtype, bool error) {
    if (cuda_runs_on_cpu() && ++number % 3 != 0) return;  // which takes long
    Blocks want(code, dtype, sizes_, error, number % 2 == 0 ? 1 : 1e-39, number % 2 == 0), got = want;
    want.encode(ref_codes(), {}, OnHost());
    got.encode(*codes, {}, OnCuda(driver));
    got.expect_equal(want, "cuda " + text_of(code, dtype, error));
    BlockParts parts(code, dtype, sizes_, error ? 3 : 1), device_parts = parts;
    parts.decode(ref_codes(), {}, error, OnHost());
    device_parts.decode(*codes, {}, error, OnCuda(driver));
    expect_same_outputs(device_parts, parts, "cuda " + text_of(code, dtype, error));
  });
  expect_no_error();
}

}  // namespace
}  // namespace ds::kernels::test
