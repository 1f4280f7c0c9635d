// Gathers and reduce-scatters that travel packed, over threads, against the plain ones within the codec's bound.
#include "comm/decorators/quantized.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "../on_threads.h"
#include "base/error.h"
#include "comm/transports/thread_communicator.h"

namespace ds::comm {
namespace {

constexpr int64_t kSizes[] = {0, 1, 7, 64, 65, 1000};

// The tensor of rank `rank`: pieces of very different sizes in one tensor.
at::Tensor values(int rank, int64_t numel, at::ScalarType type) {
  const at::Tensor steps = at::arange(numel, at::kDouble) + rank * 3 + 1;
  return (at::sin(steps * 1.7) * at::exp(at::cos(steps * 0.01) * 4)).to(type);
}

double peak(const at::Tensor& tensor) { return tensor.numel() ? tensor.to(at::kDouble).abs().max().item<double>() : 0; }

// The error that storing a number in `type` may add.
double rounding(at::ScalarType type, double size) {
  return size * (type == at::kBFloat16 ? 1.0 / 128 : type == at::kHalf ? 1.0 / 1024 : 1e-6) + 1e-7;
}

template <typename Body>
void on_ranks(int size, const Body& body) {
  const auto all = thread_communicators(size);
  on_threads(size, [&](int rank) { body(rank, all[rank]); });
}

class Quantized : public testing::TestWithParam<std::tuple<int, at::ScalarType, at::ScalarType>> {};

TEST_P(Quantized, EqualsThePlainOnesWithinTheBound) {
  const int n = std::get<0>(GetParam());
  const at::ScalarType type = std::get<1>(GetParam());
  const CodecPtr codec = blockwise_int8(64, std::get<2>(GetParam()));
  std::vector<std::vector<at::Tensor>> gathered(n);
  on_ranks(n, [&](int rank, const CommunicatorPtr& plain) {
    const CommunicatorPtr packed = quantized(plain, codec);
    for (const int64_t numel : kSizes) {
      const at::Tensor mine = values(rank, numel, type);
      const at::Tensor all = at::empty({n * numel}, mine.options()), exact = at::empty_like(all);
      packed->all_gather(mine, all, "weight")->wait();
      plain->all_gather(mine, exact)->wait();
      gathered[rank].push_back(all);
      const double most = peak(exact);
      EXPECT_LE(peak(all.to(at::kDouble) - exact.to(at::kDouble)), codec->bound(most) + rounding(type, most));

      const at::Tensor rows = values(rank, n * numel, type);
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
        const at::Tensor sum = at::empty({numel}, rows.options().dtype(at::kFloat)), wanted = at::empty_like(sum);
        packed->run({Verb::kReduceScatter, rows.clone(), sum, {}, {}, op, -1, {}})->wait();
        plain->run({Verb::kReduceScatter, rows.clone(), wanted, {}, {}, op, -1, {}})->wait();
        double error = 1e-5 * n * 60;
        for (int r = 0; r < n; ++r) error += codec->bound(peak(values(r, n * numel, type)));
        EXPECT_LE(peak(sum - wanted), op == ReduceOp::kAvg ? error / n : error);
      }
    }
  });
  for (const auto& theirs : gathered)  // all ranks have the same bits
    for (size_t i = 0; i < theirs.size(); ++i) EXPECT_TRUE(at::equal(theirs[i], gathered[0][i]));
}

TEST_P(Quantized, LetsEverythingElsePass) {
  const int n = std::get<0>(GetParam());
  const at::ScalarType type = std::get<1>(GetParam());
  on_ranks(n, [&](int rank, const CommunicatorPtr& plain) {
    const CommunicatorPtr packed = quantized(plain, blockwise_int8(64, std::get<2>(GetParam())));
    const at::Tensor tensor = values(rank, 100, type), other = tensor.clone();
    packed->all_reduce(tensor, ReduceOp::kSum)->wait();
    plain->all_reduce(other, ReduceOp::kSum)->wait();
    EXPECT_TRUE(at::equal(tensor, other));
    packed->broadcast(tensor, n - 1)->wait();
    const at::Tensor whole = at::arange(n * 10, at::kLong) * (rank + 1), part = at::empty({10}, at::kLong);
    packed->reduce_scatter(whole.clone(), part)->wait();  // whole numbers
    EXPECT_TRUE(at::equal(part, at::arange(rank * 10, rank * 10 + 10, at::kLong) * (n * (n + 1) / 2)));
    const at::Tensor largest = at::empty({100 / n}, tensor.options()), wanted = at::empty_like(largest);
    const at::Tensor rows = values(rank, 100 / n * n, type);
    packed->run({Verb::kReduceScatter, rows.clone(), largest, {}, {}, ReduceOp::kMax, -1, {}})->wait();
    plain->run({Verb::kReduceScatter, rows.clone(), wanted, {}, {}, ReduceOp::kMax, -1, {}})->wait();
    EXPECT_TRUE(at::equal(largest, wanted));
    packed->barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Quantized,
                         testing::Combine(testing::Range(1, 9), testing::Values(at::kFloat, at::kHalf, at::kBFloat16),
                                          testing::Values(at::kFloat, at::kHalf)));

TEST(Codec, MovesAQuarterOfTheBytesOfFp32) {
  EXPECT_EQ(blockwise_int8(2048, at::kFloat)->packed_bytes(1 << 20), (1 << 20) + 512 * 4);
  EXPECT_EQ(blockwise_int8(2048, at::kHalf)->packed_bytes(1 << 20), (1 << 20) + 512 * 2);
  EXPECT_EQ(blockwise_int8()->packed_bytes(0), 0);
  EXPECT_EQ(blockwise_int8()->packed_bytes(3) % 8, 0);
}

TEST(Codec, WhatIsNotFiniteMakesNanOfItsBlockAlone) {
  const CodecPtr codec = blockwise_int8(4);
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    const at::Tensor given = at::ones({12}, at::kFloat), back = at::zeros({12}, at::kFloat);
    given[5] = bad;
    given.narrow(0, 8, 4).zero_();
    const at::Tensor packed = at::empty({codec->packed_bytes(12)}, at::kByte);
    codec->pack(given, packed);
    codec->unpack(packed, back);
    EXPECT_TRUE(at::equal(back.narrow(0, 0, 4), at::ones({4}, at::kFloat)));
    EXPECT_TRUE(back.narrow(0, 4, 4).isnan().all().item<bool>());
    EXPECT_TRUE(at::equal(back.narrow(0, 8, 4), at::zeros({4}, at::kFloat)));
  }
}

TEST(Codec, RefusesWhatItCannotDo) {
  EXPECT_THROW(blockwise_int8(0), Error);
  EXPECT_THROW(blockwise_int8(64, at::kInt), Error);
}

}  // namespace
}  // namespace ds::comm
