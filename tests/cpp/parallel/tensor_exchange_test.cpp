// Layers that are cut among ranks against what one process computes: results and gradients, the number of calls,
// gathers of uneven parts, and gradients that are summed. Worlds 1 to 8, odd sizes. Ranks are threads.
#include "parallel/tensor_exchange.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "../error_of.h"
#include "../on_threads.h"
#include "comm/transports/thread_communicator.h"

namespace ds::parallel {
namespace {

using Widths = std::vector<int64_t>;
using torch::autograd::grad;

constexpr int64_t kRows = 3, kInputs = 5, kInside = 11, kOutputs = 4;

void with_ranks(int size, const std::function<void(int, const comm::CommunicatorPtr&)>& body) {
  const auto between = comm::thread_communicators(size);
  on_threads(size, [&](int rank) { body(rank, between[rank]); });
}

// Values that differ, alike on all ranks.
at::Tensor values(Widths sizes, double phase) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return (at::arange(numel, at::kDouble) * 1.7 + phase).sin().view(sizes);
}

at::Tensor leaf(const at::Tensor& tensor) { return tensor.clone().set_requires_grad(true); }

// The elements of each rank: the first ranks have one more.
Widths deal(int64_t size, int ranks) {
  Widths found;
  for (int rank = 0; rank < ranks; ++rank) found.push_back(size / ranks + (rank < size % ranks));
  return found;
}

at::Tensor own(const at::Tensor& whole, int64_t dim, const Widths& widths, int rank) {
  int64_t start = 0;
  for (int r = 0; r < rank; ++r) start += widths[static_cast<size_t>(r)];
  return whole.narrow(dim, start, widths[static_cast<size_t>(rank)]);
}

struct Unit {  // a gated unit: two layers of one input, one behind them
  at::Tensor x = leaf(values({kRows, kInputs}, 0.1)), gate = values({kInside, kInputs}, 0.2);
  at::Tensor bias = values({kInside}, 0.3), up = values({kInside, kInputs}, 0.4),
             down = values({kOutputs, kInside}, 0.5);
  at::Tensor seed = values({kRows, kOutputs}, 0.6);
};

class TensorExchanges : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(TensorExchanges, EqualOneProcess) {
  const auto [n, overlap] = GetParam();
  const Unit one;
  const at::Tensor gate = leaf(one.gate), bias = leaf(one.bias), up = leaf(one.up), down = leaf(one.down);
  const at::Tensor wanted = at::linear(at::linear(one.x, gate, bias).tanh() * at::linear(one.x, up), down);
  const auto back = grad({wanted}, {one.x, gate, bias, up, down}, {one.seed});
  with_ranks(n, [&, n = n, overlap = overlap](int rank, const comm::CommunicatorPtr& ranks) {
    const Widths widths = deal(kInside, n);
    const auto mine = [&](const at::Tensor& whole, int64_t dim) { return leaf(own(whole, dim, widths, rank)); };
    const at::Tensor x = leaf(one.x.detach()), g = mine(one.gate, 0), b = mine(one.bias, 0), u = mine(one.up, 0),
                     d = mine(one.down, 1);
    TensorExchange exchange(ranks, overlap);
    const at::Tensor found =
        exchange.sum_out(at::linear(exchange.linear(x, g, b).tanh() * exchange.linear(x, u, c10::nullopt), d));
    EXPECT_TRUE(at::allclose(found, wanted, 1e-12, 1e-12));
    const int64_t before = ranks->traffic().calls;
    const auto grads = grad({found}, {x, g, b, u, d}, {one.seed});
    // Two layers read x: one all-reduce together, or one each where they overlap.
    EXPECT_EQ(ranks->traffic().calls - before, n == 1 ? 0 : overlap ? 2 : 1);
    const at::Tensor expected[] = {back[0], own(back[1], 0, widths, rank), own(back[2], 0, widths, rank),
                                   own(back[3], 0, widths, rank), own(back[4], 1, widths, rank)};
    for (size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(at::allclose(grads[i], expected[i], 1e-12, 1e-12)) << i;
  });
}

TEST_P(TensorExchanges, PartsOfASequenceEqualOneProcess) {
  const auto [n, even] = GetParam();
  const int64_t tokens = even ? 8 * n : 9;
  const Unit one;
  const at::Tensor x = leaf(values({2, tokens, kInputs}, 0.1)), seed = values({2, tokens, kOutputs}, 0.6);
  const at::Tensor gate = leaf(one.gate), up = leaf(one.up), down = leaf(one.down);
  const at::Tensor wanted = at::linear(at::linear(x, gate).tanh() * at::linear(x, up), down);
  const auto back = grad({wanted}, {x, gate, up, down}, {seed});
  with_ranks(n, [&, n = n, even = even](int rank, const comm::CommunicatorPtr& ranks) {
    const Widths widths = deal(tokens, n), inside = deal(kInside, n);
    const auto mine = [&](const at::Tensor& whole, int64_t dim) { return leaf(own(whole, dim, inside, rank)); };
    const at::Tensor part = leaf(own(x.detach(), 1, widths, rank)), g = mine(one.gate, 0), u = mine(one.up, 0),
                     d = mine(one.down, 1);
    TensorExchange exchange(ranks, false);
    const int64_t before = ranks->traffic().bytes;
    const at::Tensor whole = exchange.gather_in(part, 1, widths);
    EXPECT_TRUE(exchange.gather_in(part, 1, widths).is_same(whole)) << "layers that read one tensor share a gather";
    exchange.copy_in(g);
    EXPECT_TRUE(exchange.copy_in(whole).is_same(whole)) << "its gradient is summed already";
    const at::Tensor found =
        exchange.scatter_out(at::linear(at::linear(whole, g).tanh() * at::linear(whole, u), d), 1, widths);
    EXPECT_TRUE(at::allclose(found, own(wanted, 1, widths, rank), 1e-12, 1e-12));
    const auto grads = grad({found}, {part, g, u, d}, {own(seed, 1, widths, rank)});
    const at::Tensor expected[] = {own(back[0], 1, widths, rank), own(back[1], 0, inside, rank),
                                   own(back[2], 0, inside, rank), own(back[3], 1, inside, rank)};
    for (size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(at::allclose(grads[i], expected[i], 1e-12, 1e-12)) << i;
    // The bytes are those of an all-reduce of the inputs' gradients and of one of the outputs.
    const int64_t rows = 2 * tokens, item = sizeof(double);
    if (even) EXPECT_EQ(ranks->traffic().bytes - before, 2 * rows * item * (kInputs + kOutputs) * (n - 1) / n);
  });
}

TEST_P(TensorExchanges, GatherAndSplitUnevenParts) {
  const auto [n, last] = GetParam();
  const int64_t dim = last ? -1 : 1;
  const at::Tensor whole = values({2, kInside, kInside}, 0.7), seed = values({2, kInside, kInside}, 0.8);
  const Widths widths = deal(kInside, n);
  with_ranks(n, [&](int rank, const comm::CommunicatorPtr& ranks) {
    const at::Tensor part = leaf(own(whole, dim, widths, rank));
    const at::Tensor joined = gather_widths(ranks, part, dim, widths);
    EXPECT_TRUE(at::equal(joined, whole));
    EXPECT_TRUE(at::equal(grad({joined}, {part}, {seed})[0], own(seed, dim, widths, rank)));
    const at::Tensor all = leaf(whole), piece = split_widths(ranks, all, dim, widths);
    EXPECT_TRUE(at::equal(piece, part));
    EXPECT_TRUE(at::equal(grad({piece}, {all}, {own(seed, dim, widths, rank)})[0], seed));
  });
}

INSTANTIATE_TEST_SUITE_P(, TensorExchanges, testing::Combine(testing::Values(1, 2, 3, 5, 8), testing::Bool()));

TEST(TensorExchange, WidthsThatDoNotFitAreRefused) {
  with_ranks(2, [](int rank, const comm::CommunicatorPtr& ranks) {
    const at::Tensor whole = at::zeros({2, 6});
    EXPECT_NE(error_of([&] {
                split_widths(ranks, whole, 1, {4, 3});
              }).find("6 wide does not fit the widths [4, 3]"),
              std::string::npos);
    if (rank == 0) return;
    EXPECT_NE(error_of([&] { gather_widths(ranks, whole, 1, {6, 5}); }).find("6 wide"), std::string::npos);
  });
}

TEST(TensorExchange, AChangedTensorComesInAnew) {
  with_ranks(2, [](int, const comm::CommunicatorPtr& ranks) {
    TensorExchange exchange(ranks, false);
    const at::Tensor x = leaf(at::ones({2})) * 1, first = exchange.copy_in(x);
    EXPECT_TRUE(exchange.copy_in(x).is_same(first));
    x.add_(1);
    EXPECT_FALSE(exchange.copy_in(x).is_same(first));
    const at::Tensor other = leaf(at::ones({2})) * 1, second = exchange.copy_in(other);
    EXPECT_FALSE(second.is_same(first));
    exchange.sum_out(other);
    EXPECT_FALSE(exchange.copy_in(other).is_same(second)) << "the layers behind sum_out() are others";
    const c10::NoGradGuard off;
    EXPECT_TRUE(exchange.copy_in(other).is_same(other));
  });
}

TEST(TensorExchange, GradientsOfSharedParametersAreSummed) {
  with_ranks(3, [](int rank, const comm::CommunicatorPtr& ranks) {
    const at::Tensor scale = leaf(values({4}, 0.9));
    sum_gradients(scale, ranks);
    (scale * static_cast<double>(rank + 1)).sum().backward();
    EXPECT_TRUE(at::equal(scale.grad(), at::full({4}, 6.0, at::kDouble)));
    (scale * static_cast<double>(rank + 1)).sum().backward();  // the sum of a second backward is added
    EXPECT_TRUE(at::equal(scale.grad(), at::full({4}, 12.0, at::kDouble)));
  });
}

}  // namespace
}  // namespace ds::parallel
