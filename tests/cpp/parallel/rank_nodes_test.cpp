// Gather, scatter, reduce, share and exchanges of rows against what one process computes from the tensors of all ranks:
// results, gradients and gradients of gradients; worlds 1 to 8, odd sizes. Ranks are threads.
#include "parallel/rank_nodes.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <random>

#include "../error_of.h"
#include "../on_threads.h"
#include "comm/transports/shm_communicator.h"
#include "comm/transports/thread_communicator.h"

namespace ds::parallel {
namespace {

using Counts = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;
using torch::autograd::grad;

void with_ranks(int size, bool shared, const std::function<void(int, const comm::CommunicatorPtr&)>& body) {
  const auto between = comm::thread_communicators(size);
  on_threads(size, [&](int rank) {
    comm::CommunicatorPtr made = between[rank];
    if (shared && size > 1) made = comm::shm_communicator(made, std::chrono::seconds(600), {});
    body(rank, made);
  });
}

// Small whole numbers, which differ between ranks; some have strides that do not follow each other.
at::Tensor numbers(const Counts& sizes, int rank, int turn, at::ScalarType type) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  at::Tensor made = ((at::arange(numel, at::kDouble) * 3 + rank * 5 + turn * 7).remainder(11) - 4).view(sizes).to(type);
  if (turn % 3 == 1 && sizes.size() > 1) made = made.transpose(0, 1).contiguous().transpose(0, 1);
  return made;
}

bool same(const at::Tensor& found, const at::Tensor& wanted) {
  return found.sizes() == wanted.sizes() && found.scalar_type() == wanted.scalar_type() && at::equal(found, wanted);
}

at::Tensor sum_of_all(const Tensors& all) {
  at::Tensor sum = all[0].to(at::kDouble);
  for (size_t r = 1; r < all.size(); ++r) sum = sum + all[r].to(at::kDouble);
  return sum.to(all[0].scalar_type());
}

at::Tensor part_of(const at::Tensor& whole, int rank, int64_t n, int64_t dim) {
  return whole.narrow(dim, rank * (whole.size(dim) / n), whole.size(dim) / n);
}

// `call` of this rank's `input` gives `result`; from `upper` its gradient is `back`. The gradient of that gradient,
// from the input as the upper one, is the call again: all functions here are linear.
template <typename Call>
void expect(const Call& call, const at::Tensor& input, const at::Tensor& result, const at::Tensor& upper,
            const at::Tensor& back) {
  EXPECT_TRUE(same(call(input), result));
  EXPECT_FALSE(call(input).requires_grad());
  const at::Tensor x = input.clone().set_requires_grad(true), seed = upper.clone().set_requires_grad(true);
  {
    const c10::NoGradGuard off;
    EXPECT_TRUE(!call(x).requires_grad() || call(x).is_same(x));
  }
  const at::Tensor y = call(x);
  ASSERT_TRUE(y.requires_grad());
  const at::Tensor once = grad({y}, {x}, {seed}, true, true)[0];
  EXPECT_TRUE(same(once, back));
  EXPECT_TRUE(same(grad({once}, {seed}, {input})[0], result));
}

class RankNodes : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(RankNodes, EqualOneProcess) {
  const auto [n, shared] = GetParam();
  with_ranks(n, shared, [n = n](int rank, const comm::CommunicatorPtr& ranks) {
    std::mt19937 random(7 * n);  // the same on all ranks
    for (int turn = 0; turn < 12; ++turn) {
      const auto below = [&](unsigned most) { return static_cast<int64_t>(random() % most); };
      const at::ScalarType types[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
      const at::ScalarType type = types[below(4)];
      const int64_t dims = 1 + below(3), dim = below(static_cast<unsigned>(dims)), named = dim - (turn % 2 ? dims : 0);
      Counts sizes;
      for (int64_t i = 0; i < dims; ++i) sizes.push_back(below(6) + (turn > 2));
      Counts whole_sizes = sizes;
      whole_sizes[dim] *= n;
      const auto of = [&](const Counts& shape, int which, int more) {
        return numbers(shape, which, turn + more, type);
      };
      const auto all = [&](const Counts& shape, int more) {
        Tensors made;
        for (int r = 0; r < n; ++r) made.push_back(of(shape, r, more));
        return made;
      };
      const at::Tensor whole = at::cat(all(sizes, 0), dim), alike = of(whole_sizes, 0, 1);
      expect([&](const at::Tensor& x) { return gather(ranks, x, named); }, of(sizes, rank, 0), whole, alike,
             part_of(alike, rank, n, dim).contiguous());
      expect([&](const at::Tensor& x) { return scatter(ranks, x, named); }, alike,
             part_of(alike, rank, n, dim).contiguous(), of(sizes, rank, 0), whole);
      const at::Tensor sum = sum_of_all(all(sizes, 0)), one = of(sizes, 0, 1);
      expect([&](const at::Tensor& x) { return reduce(ranks, x); }, of(sizes, rank, 0), sum, one, one);
      expect([&](const at::Tensor& x) { return share(ranks, x); }, one, one, of(sizes, rank, 0), sum);

      // Rank a gives rank b give(a, b) rows.
      const auto give = [&](int a, int b) { return (a * 3 + b * 5 + turn) % 4; };
      const auto rows_of = [&](int r, bool back, int more) {
        Counts shape = sizes;
        shape[0] = 0;
        for (int other = 0; other < n; ++other) shape[0] += back ? give(other, r) : give(r, other);
        return of(shape, r, more);
      };
      const auto exchanged = [&](bool back, int more) {  // what comes to this rank
        Tensors parts;
        for (int from = 0; from < n; ++from) {
          int64_t start = 0;
          for (int to = 0; to < rank; ++to) start += back ? give(to, from) : give(from, to);
          parts.push_back(rows_of(from, back, more).narrow(0, start, back ? give(rank, from) : give(from, rank)));
        }
        return at::cat(parts);
      };
      Counts given, taken;
      for (int other = 0; other < n; ++other) {
        given.push_back(give(rank, other));
        taken.push_back(give(other, rank));
      }
      expect([&](const at::Tensor& x) { return exchange_rows(ranks, x, given, taken); }, rows_of(rank, false, 0),
             exchanged(false, 0), rows_of(rank, true, 1), exchanged(true, 1));

      // In two calls, with another exchange in between, forth and back.
      int64_t bytes = 0;
      int waits = 0;
      const auto exchange = [&] {
        return std::make_shared<RowExchange>(
            ranks, given, taken, "rows", [&](int64_t more) { bytes += more; }, [&](double) { ++waits; });
      };
      const at::Tensor x = rows_of(rank, false, 0).clone().set_requires_grad(true);
      const auto first = exchange(), second = exchange();
      const at::Tensor a = first->start(x), b = second->start(x * 2);
      const at::Tensor y = first->wait(a), z = second->wait(b);
      EXPECT_TRUE(same(y.detach(), exchanged(false, 0)) && same(z.detach(), exchanged(false, 0) * 2));
      const at::Tensor upper = rows_of(rank, true, 1), found = grad({y, z}, {x}, {upper, upper})[0];
      EXPECT_TRUE(same(found, exchanged(true, 1) * 3));
      const int64_t width = x.size(0) ? x.numel() / x.size(0) : 0, bytes_each = static_cast<int64_t>(x.element_size());
      const int64_t forth = x.size(0) - given[rank], back = upper.size(0) - taken[rank];
      if (x.size(0) && upper.size(0)) {
        EXPECT_EQ(bytes, 2 * (forth + back) * width * bytes_each);
      }
      EXPECT_EQ(waits, 4);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, RankNodes, testing::Combine(testing::Range(1, 9), testing::Bool()));

TEST(RankNodesOfTwo, RefusesWhatDoesNotFit) {
  with_ranks(2, false, [](int, const comm::CommunicatorPtr& ranks) {
    EXPECT_NE(error_of([&] {
                scatter(ranks, at::zeros({3, 5}), -1);
              }).find("5 cannot be cut into 2 equal parts"),
              std::string::npos);
    EXPECT_NE(error_of([&] {
                exchange_rows(ranks, at::zeros({3, 5}), {1, 1}, {1, 1});
              }).find("2 rows got a tensor"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace ds::parallel
