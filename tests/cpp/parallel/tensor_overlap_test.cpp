// Sums over ranks that run while other work is done, in forward and in backward: values and gradients of one process,
// and the order of all calls. Worlds 1 to 8. Ranks are threads.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <vector>

#include "../comm/transports.h"
#include "../error_of.h"
#include "../on_threads.h"
#include "comm/decorators/forwarding.h"
#include "comm/transports/thread_communicator.h"
#include "parallel/gradient_node.h"
#include "parallel/tensor_exchange.h"

namespace ds::parallel {
namespace {

using torch::autograd::grad;
using Events = std::vector<std::string>;

constexpr int64_t kRows = 3, kWidth = 4, kInside = 24;

at::Tensor values(const std::vector<int64_t>& sizes, double phase) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return (at::arange(numel, at::kDouble) * 1.7 + phase).sin().view(sizes);
}

at::Tensor leaf(const at::Tensor& tensor) { return tensor.clone().set_requires_grad(true); }

// Writes down when each call begins and when it is waited for.
class Recorded : public comm::ForwardingCommunicator {
 public:
  Recorded(comm::CommunicatorPtr inner, Events& events) : ForwardingCommunicator(std::move(inner)), events_(events) {}

 protected:
  comm::WorkPtr start(const comm::Op& op) override {
    const std::string number = std::to_string(calls_++);
    EXPECT_EQ(op.wait, comm::Wait::kDetached);
    events_.push_back("begin " + number);
    return std::make_shared<comm::JoinedWork>(std::vector<comm::WorkPtr>{inner_->run(op)},
                                              [this, number] { events_.push_back("end " + number); });
  }

 private:
  Events& events_;
  int calls_ = 0;
};

// Parameters of one rank, for layers that each add a cut unit to their input.
struct Layers {
  Layers(int layers, int rank, int ranks) {
    const int64_t width = kInside / ranks;
    for (int layer = 0; layer < layers; ++layer) {
      params.push_back(leaf(values({kInside, kWidth}, layer + 0.1).narrow(0, rank * width, width)));
      params.push_back(leaf(values({kWidth, kInside}, layer + 0.2).narrow(1, rank * width, width)));
    }
  }
  std::vector<at::Tensor> params;
};

// Two halves of `x` take turns. Writes down when a layer computes for a half, in each direction.
at::Tensor by_halves(const TensorExchange& exchange, const Layers& layers, const at::Tensor& x, Events& events) {
  std::vector<at::Tensor> halves = x.tensor_split(2);
  std::vector<PendingSum> sums;
  const auto finish = [&](size_t half) { halves[half] = halves[half] + sums[sums.size() - 2].wait(); };
  uint64_t behind = place_now();
  for (size_t layer = 0; layer < layers.params.size() / 2; ++layer)
    for (size_t half = 0; half < 2; ++half) {
      if (layer > 0) finish(half);
      const std::string name = std::to_string(layer) + std::to_string(half);
      const uint64_t begins = place_now();
      const at::Tensor input = exchange.copy_in_beside(halves[half], behind);
      events.push_back("forward " + name);
      const at::Tensor made =
          at::linear(at::linear(input, layers.params[2 * layer]).tanh(), layers.params[2 * layer + 1]);
      sums.push_back(exchange.start_sum(
          with_gradient("SeenBackward", made, alias_of(made), [&events, name](const at::Tensor& grad) {
            events.push_back("backward " + name);
            return grad;
          })));
      behind = begins;
    }
  halves[0] = halves[0] + sums[sums.size() - 2].wait();
  halves[1] = halves[1] + sums.back().wait();
  return at::cat(halves);
}

at::Tensor whole(const Layers& layers, at::Tensor x) {
  for (size_t i = 0; i < layers.params.size(); i += 2)
    x = x + at::linear(at::linear(x, layers.params[i]).tanh(), layers.params[i + 1]);
  return x;
}

class OverlappedSums : public testing::TestWithParam<int> {};

TEST_P(OverlappedSums, EqualOneProcess) {
  const int n = GetParam();
  const Layers one(3, 0, 1);
  const at::Tensor x = leaf(values({kRows, kWidth}, 0.3)), seed = values({kRows, kWidth}, 0.4);
  const at::Tensor wanted = whole(one, x);
  std::vector<at::Tensor> leaves = one.params;
  leaves.push_back(x);
  const auto back = grad({wanted}, leaves, {seed}, true, true);
  const auto twice = grad({back.back().square().sum()}, {x})[0];
  const auto between = comm::thread_communicators(n);
  on_threads(n, [&](int rank) {
    const Layers own(3, rank, n);
    Events events;
    const TensorExchange exchange(between[rank], false);
    const at::Tensor input = leaf(x.detach());
    const at::Tensor found = by_halves(exchange, own, input, events);
    EXPECT_TRUE(at::allclose(found, wanted, 1e-12, 1e-12));
    std::vector<at::Tensor> mine = own.params;
    mine.push_back(input);
    for (int turn = 0; turn < 2; ++turn) {  // a graph that is kept runs again
      const auto grads = grad({found}, mine, {seed}, true, turn == 1);
      for (size_t i = 0; i < grads.size(); ++i) {
        const int64_t dim = i % 2, width = kInside / n;
        const at::Tensor expected = i + 1 == grads.size() ? back[i] : back[i].narrow(dim, rank * width, width);
        EXPECT_TRUE(at::allclose(grads[i], expected, 1e-12, 1e-12)) << i;
      }
      if (turn == 1) {
        const at::Tensor second = grad({grads.back().square().sum()}, {input})[0];
        EXPECT_TRUE(at::allclose(second, twice, 1e-12, 1e-12)) << "the gradient of the gradient";
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, OverlappedSums, testing::Values(1, 2, 3, 8));

TEST(TensorOverlap, EachSumRunsWhileTheOtherHalfIsComputed) {
  const auto between = comm::thread_communicators(2);
  on_threads(2, [&](int rank) {
    Events events;
    const TensorExchange exchange(std::make_shared<Recorded>(between[rank], events), false);
    const Layers own(2, rank, 2);
    const at::Tensor found = by_halves(exchange, own, leaf(values({kRows, kWidth}, 0.3)), events);
    const Events forward = {"forward 00", "begin 0", "forward 01", "begin 1", "end 0", "forward 10",
                            "begin 2",    "end 1",   "forward 11", "begin 3", "end 2", "end 3"};
    EXPECT_EQ(events, forward);
    events.clear();
    found.sum().backward();
    const Events backward = {"backward 11", "begin 4", "backward 10", "begin 5", "end 4", "backward 01",
                             "begin 6",     "end 5",   "backward 00", "begin 7", "end 6", "end 7"};
    EXPECT_EQ(events, backward);
  });
}

TEST(TensorOverlap, AGradientIsWaitedForBehindTheWorkSinceItsPlace) {
  const auto between = comm::thread_communicators(2);
  on_threads(2, [&](int rank) {
    Events events;
    const TensorExchange exchange(std::make_shared<Recorded>(between[rank], events), false);
    const auto seen = [&](const char* name, const at::Tensor& x) {
      return with_gradient("SeenBackward", x, alias_of(x), [&events, name](const at::Tensor& grad) {
        events.emplace_back(name);
        return grad;
      });
    };
    const at::Tensor x = leaf(values({kRows}, 0.3)), earlier = seen("earlier", x);
    const uint64_t place = place_now();
    const at::Tensor since = seen("since", x), own = seen("own", exchange.copy_in_beside(x, place));
    (earlier + since + own).sum().backward();
    EXPECT_EQ(events, (Events{"own", "begin 0", "since", "end 0", "earlier"}));
    EXPECT_TRUE(at::equal(x.grad(), at::full({kRows}, 4.0, at::kDouble)));
  });
}

TEST(TensorOverlap, ThePartMayChangeAndTheSumIsTakenOnce) {
  const auto between = comm::thread_communicators(2);
  on_threads(2, [&](int rank) {
    const at::Tensor part = at::full({2}, rank + 1.0);
    PendingSum sum(between[rank], part);
    part.zero_();
    EXPECT_TRUE(at::equal(sum.wait(), at::full({2}, 3.0)));
    EXPECT_NE(error_of([&] { sum.wait(); }).find("was called twice"), std::string::npos);
  });
}

// One rank over NCCL whose layers are told that there are two, so that they exchange.
class SaidToBeTwo : public comm::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  int size() const override { return 2; }

 protected:
  comm::WorkPtr start(const comm::Op& op) override { return inner_->run(op); }
};

TEST(TensorOverlap, OnADeviceWhatReadsASumWaitsForIt) {
  using namespace comm::testing_transports;
  const Layers one(2, 0, 1);
  const at::Tensor x = leaf(values({kRows, kWidth}, 0.3)), seed = values({kRows, kWidth}, 0.4);
  const at::Tensor wanted = whole(one, x);
  const auto back = grad({wanted}, {x, one.params[0]}, {seed});
  const auto body = [&](bool sound) {
    const c10::DeviceGuard current(device_of(0));
    comm::CommunicatorPtr ranks = comm::thread_communicators(1)[0];
    if (on_standin()) ranks = nccl_on_device(ranks, comm::NcclLibrary::open(comm::fake_nccl_path())->make_id());
    Layers own(2, 0, 1);
    for (at::Tensor& param : own.params) param = leaf(param.detach().to(device_of(0)));
    const at::Tensor input = leaf(x.detach().to(device_of(0)));
    Events events;
    const TensorExchange exchange(std::make_shared<SaidToBeTwo>(ranks), false);
    const at::Tensor found = by_halves(exchange, own, input, events);
    const auto grads = grad({found}, {input, own.params[0]}, {seed.to(device_of(0))});
    if (!sound) return;
    EXPECT_TRUE(at::allclose(found.cpu(), wanted, 1e-12, 1e-12));
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(grads[i].cpu(), back[i], 1e-12, 1e-12)) << i;
  };
  EXPECT_EQ(waits_that_nothing_misses(body), std::vector<std::string>{});
}

}  // namespace
}  // namespace ds::parallel
