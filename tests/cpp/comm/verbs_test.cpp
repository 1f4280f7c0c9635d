// Every verb over every transport and 1 to 8 ranks, with even and uneven counts, in random sequences, against a serial
// model. Ranks are threads; tests/dist has torch's process groups.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <deque>
#include <random>

#include "../error_of.h"
#include "../every_case.h"
#include "base/error.h"
#include "transports.h"

namespace ds::comm {
namespace {

using namespace testing_transports;

struct Case {
  Verb verb;
  ReduceOp reduce;
  at::ScalarType type;
  int root;
  int64_t numel;
  bool uneven, in_place, wait;
};

bool integral(at::ScalarType type) { return at::isIntegralType(type, false); }

// The same sequence on all ranks.
std::vector<Case> cases(int count, int size, bool pairs, unsigned seed) {
  std::mt19937 random(seed);
  const at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kInt, at::kByte, at::kLong, at::kDouble};
  std::vector<Case> made;
  while (static_cast<int>(made.size()) < count) {
    const int64_t limit = random() % 50 == 0 ? 40000 : 100;
    Case c{static_cast<Verb>(random() % kVerbs),
           static_cast<ReduceOp>(random() % 8),
           types[random() % 7],
           static_cast<int>(random() % size),
           static_cast<int64_t>(random() % limit),
           random() % 2 == 0,
           random() % 2 == 0,
           random() % 3 != 0};
    if (c.reduce >= ReduceOp::kAnd && !integral(c.type)) c.reduce = ReduceOp::kSum;
    if (!pairs && (c.verb == Verb::kSend || c.verb == Verb::kRecv)) continue;
    made.push_back(c);
  }
  return made;
}

// The numbers that rank `rank` gives: small whole numbers, so that sums are exact in every order, and products fit.
at::Tensor given(const Case& c, int round, int rank, int64_t numel) {
  const at::Tensor numbers = at::arange(numel, at::kLong) * 7 + round * 3 + rank * 5;
  return reduces(c.verb) && c.reduce == ReduceOp::kProduct ? at::remainder(numbers, 2) + 1 : at::remainder(numbers, 11);
}

at::Tensor reduced(const Case& c, int round, int size, int64_t numel) {
  at::Tensor all = given(c, round, 0, numel);
  for (int r = 1; r < size; ++r) {
    const at::Tensor other = given(c, round, r, numel);
    switch (c.reduce) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg: all = all + other; break;
      case ReduceOp::kProduct: all = all * other; break;
      case ReduceOp::kMin: all = at::minimum(all, other); break;
      case ReduceOp::kMax: all = at::maximum(all, other); break;
      case ReduceOp::kAnd: all = at::bitwise_and(all, other); break;
      case ReduceOp::kOr: all = at::bitwise_or(all, other); break;
      case ReduceOp::kXor: all = at::bitwise_xor(all, other); break;
    }
  }
  if (c.reduce != ReduceOp::kAvg) return all;
  if (integral(c.type)) return at::div(all, size, "trunc");
  return all.to(c.type == at::kDouble ? at::kDouble : at::kFloat) / size;
}

// The count of part r, for verbs that have one for each rank.
std::vector<int64_t> counts(const Case& c, int round, int size) {
  std::vector<int64_t> made;
  for (int r = 0; r < size; ++r) made.push_back(c.uneven ? (r * 7 + round) % 3 * c.numel / 2 : c.numel);
  return made;
}
// From one rank to another, of kAllToAll.
int64_t count(const Case& c, int round, int from, int to) {
  return c.uneven ? (from + 2 * to + round) % 3 * c.numel / 2 : c.numel;
}

int64_t sum(const std::vector<int64_t>& counts, int up_to = 1 << 20) {
  int64_t total = 0;
  for (int r = 0; r < std::min(up_to, static_cast<int>(counts.size())); ++r) total += counts[r];
  return total;
}

struct Call {
  std::vector<Op> ops;  // none: this rank takes no part
  std::function<bool()> correct;
};

Call call(const Case& c, int round, int rank, int size) {
  Op op{c.verb, {}, {}, {}, {}, c.reduce, c.root, "round " + std::to_string(round)};
  const auto options = at::TensorOptions().dtype(c.type);
  const auto mine = [&](int64_t numel) { return given(c, round, rank, numel).to(c.type); };
  const bool root = rank == c.root;
  const auto part_counts = counts(c, round, size);
  const int64_t whole = sum(part_counts), begin = sum(part_counts, rank), own = part_counts[rank];
  switch (c.verb) {
    case Verb::kBarrier: return {{op}, [] { return true; }};
    case Verb::kAllReduce:
    case Verb::kReduce:
      op.out = mine(c.numel);
      return {{op}, [=, out = op.out] {
                const bool has = root || c.verb == Verb::kAllReduce;
                return at::equal(out,
                                 (has ? reduced(c, round, size, c.numel) : given(c, round, rank, c.numel)).to(c.type));
              }};
    case Verb::kBroadcast:
      op.out = mine(c.numel);
      return {{op}, [=, out = op.out] { return at::equal(out, given(c, round, c.root, c.numel).to(c.type)); }};
    case Verb::kReduceScatter: {
      op.in = mine(whole);
      const bool wide = (c.type == at::kBFloat16 || c.type == at::kHalf) && round % 2;
      op.out = c.in_place && !wide ? op.in.narrow(0, begin, own)
                                   : at::empty({own}, wide ? options.dtype(at::kFloat) : options);
      if (c.uneven) op.in_counts = part_counts;
      return {{op}, [=, out = op.out] {
                const at::Tensor expected = reduced(c, round, size, whole).narrow(0, begin, own);
                // A transport may round before it widens.
                return at::equal(out.to(c.type), expected.to(c.type));
              }};
    }
    case Verb::kAllGather:
    case Verb::kGather: {
      const bool has = root || c.verb == Verb::kAllGather;
      if (has) op.out = at::empty({whole}, options);
      op.in = has && c.in_place ? op.out.narrow(0, begin, own).copy_(mine(own)) : mine(own);
      if (c.uneven) op.out_counts = part_counts;
      return {{op}, [=, out = op.out] {
                for (int r = 0; has && r < size; ++r)
                  if (!at::equal(out.narrow(0, sum(part_counts, r), part_counts[r]),
                                 given(c, round, r, part_counts[r]).to(c.type)))
                    return false;
                return true;
              }};
    }
    case Verb::kScatter:
      if (root) op.in = mine(whole);
      op.out = at::empty({own}, options);
      if (c.uneven) op.in_counts = part_counts;
      return {{op}, [=, out = op.out] {
                return at::equal(out, given(c, round, c.root, whole).narrow(0, begin, own).to(c.type));
              }};
    case Verb::kAllToAll: {
      std::vector<int64_t> give, take;
      for (int r = 0; r < size; ++r) {
        give.push_back(count(c, round, rank, r));
        take.push_back(count(c, round, r, rank));
      }
      op.in = given(c, round, rank, sum(give)).to(c.type);
      op.out = at::empty({sum(take)}, op.in.options());
      if (c.uneven) {
        op.in_counts = give;
        op.out_counts = take;
      }
      return {{op}, [=, out = op.out] {
                for (int r = 0; r < size; ++r) {
                  std::vector<int64_t> theirs;
                  for (int to = 0; to < size; ++to) theirs.push_back(count(c, round, r, to));
                  const at::Tensor expected = given(c, round, r, sum(theirs)).narrow(0, sum(theirs, rank), take[r]);
                  if (!at::equal(out.narrow(0, sum(take, r), take[r]), expected.to(c.type))) return false;
                }
                return true;
              }};
    }
    case Verb::kSend:
    case Verb::kRecv: break;
  }
  // From one rank to the next; for kRecv all ranks at once, in a ring.
  const bool ring = c.verb == Verb::kRecv;
  const int next = (rank + 1) % size, last = (rank + size - 1) % size;
  Call made{{}, [] { return true; }};
  if (ring || rank == (c.root + 1) % size) {
    Op take{Verb::kRecv, {}, at::empty({c.numel}, options), {}, {}, ReduceOp::kSum, last, op.tag};
    made.ops.push_back(take);
    made.correct = [=] { return at::equal(take.out, given(c, round, last, c.numel).to(c.type)); };
  }
  if (ring || root) {
    const Op give{Verb::kSend, mine(c.numel), {}, {}, {}, ReduceOp::kSum, next, op.tag};
    made.ops.insert(rank % 2 ? made.ops.begin() : made.ops.end(), give);
  }
  return made;
}

// DS_COMM_CASES: calls for each transport and number of ranks. 1000 take some minutes.
int calls() { return cases_of("DS_COMM_CASES", 80, 40); }

class Verbs : public testing::TestWithParam<std::string> {};

TEST_P(Verbs, RandomSequencesEqualASerialModel) {
  for (int size = 1; size <= 8; ++size) {
    if (!exists(GetParam(), size)) continue;
    const auto plan =
        cases(calls(), size, size > 1 && GetParam() != "all_to_all_only", 31u + static_cast<unsigned>(size));
    on_transport(GetParam(), size, [&](int rank, Communicator& comm) {
      std::deque<std::tuple<WorkPtr, std::function<bool()>, size_t>> open;
      std::mt19937 own(7u + static_cast<unsigned>(rank));  // each rank waits in an order of its own
      const auto close = [&](size_t index) {
        auto [work, correct, number] = open[index];
        work->wait();
        ASSERT_TRUE(correct()) << "rank " << rank << " of " << size << ", call " << number << ", "
                               << verb_name(plan[number].verb) << " of " << plan[number].numel << " x "
                               << c10::toString(plan[number].type) << ", " << reduce_op_name(plan[number].reduce)
                               << (plan[number].uneven ? ", uneven" : "");
        open.erase(open.begin() + static_cast<int64_t>(index));
      };
      for (size_t i = 0; i < plan.size() && !testing::Test::HasFatalFailure(); ++i) {
        const Call made = call(plan[i], static_cast<int>(i), rank, size);
        if (made.ops.empty()) continue;
        open.emplace_back(made.ops.size() == 1 ? comm.run(made.ops[0]) : comm.run_all(made.ops), made.correct, i);
        if (plan[i].wait) close(open.size() - 1);
        if (open.size() > 3) close(own() % open.size());
      }
      while (!open.empty() && !testing::Test::HasFatalFailure()) close(0);
      if (!testing::Test::HasFatalFailure()) comm.barrier();  // who goes first ends what others wait for
    });
  }
}

// One call with tensors of several sizes and types; one of them has no elements.
TEST_P(Verbs, SeveralTensorsInOneCall) {
  for (int size = 1; size <= 4; ++size) {
    if (!exists(GetParam(), size)) continue;
    on_transport(GetParam(), size, [&](int rank, Communicator& comm) {
      std::vector<TensorPair> gathered, summed;
      int64_t bytes = 0;
      for (const auto& [numel, type] : {std::pair{7, at::kFloat}, {0, at::kFloat}, {33, at::kHalf}, {1, at::kInt}}) {
        const at::Tensor own = at::arange(numel, at::kLong).add(10 * rank).to(type);
        gathered.push_back({own, at::empty({size, numel}, own.options())});
        summed.push_back({at::arange(size * numel, at::kLong).add(rank).to(type).view({size, numel}), own.clone()});
        bytes += 2 * (size - 1) * static_cast<int64_t>(own.nbytes());
      }
      comm.reset_traffic();
      const WorkPtr one = comm.all_gather(gathered, "several"), other = comm.reduce_scatter(summed, "several");
      one->wait();
      other->wait();
      EXPECT_EQ(comm.traffic().bytes, bytes);
      for (size_t i = 0; i < gathered.size(); ++i) {
        const int64_t numel = gathered[i].in.numel();
        for (int other_rank = 0; other_rank < size; ++other_rank)
          EXPECT_TRUE(
              at::equal(gathered[i].out[other_rank].to(at::kLong), at::arange(numel, at::kLong).add(10 * other_rank)));
        const at::Tensor sum = at::arange(rank * numel, (rank + 1) * numel, at::kLong) * size + size * (size - 1) / 2;
        EXPECT_TRUE(at::equal(summed[i].out, sum.to(summed[i].out.scalar_type()))) << GetParam() << " " << i;
      }
      comm.barrier();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Verbs, testing::ValuesIn(transport_names()),
                         [](const auto& parameter) { return parameter.param; });

// A call waits for what its caller has launched, and what the caller launches behind wait() for the call.
TEST(Verbs, OnADeviceCallsAndCallersWaitForEachOther) {
  const auto body = [](bool sound) {
    const c10::DeviceGuard current(device_of(0));
    CommunicatorPtr comm = thread_communicators(1)[0];
    if (on_standin()) comm = nccl_on_device(comm, NcclLibrary::open(fake_nccl_path())->make_id());
    const at::Tensor sum = at::full({3000}, 2.0, at::TensorOptions().device(device_of(0)));
    comm->all_reduce(sum, ReduceOp::kSum)->wait();
    const at::Tensor more = sum.add(1);
    if (sound) {
      EXPECT_TRUE(more.cpu().eq(3).all().item<bool>());
    }
  };
  EXPECT_EQ(waits_that_nothing_misses(body), std::vector<std::string>{});
}

TEST(Verbs, WhatDoesNotFitIsRefusedBeforeAnythingIsSent) {
  on_transport("thread", 2, [](int rank, Communicator& comm) {
    const at::Tensor three = at::zeros({3}), two = at::zeros({2}), four = at::zeros({4});
    const auto refused = [&](const Op& op, const std::string& text) {
      const std::string said = error_of([&] { comm.run(op)->wait(); });
      EXPECT_TRUE(says(said, text));
    };
    refused({Verb::kReduceScatter, three, two, {}, {}, ReduceOp::kSum, -1, {}},
            "reduce_scatter: 3 elements for 2 rows of 2");
    refused({Verb::kAllGather, two, three, {}, {}, ReduceOp::kSum, -1, {}}, "all_gather: 3 elements for 2 rows of 2");
    refused({Verb::kAllGather, two, four, {}, {4}, ReduceOp::kSum, -1, {}}, "all_gather: 1 counts for 2 ranks");
    refused({Verb::kAllGather, two, four, {}, {3, 3}, ReduceOp::kSum, -1, {}}, "has 2 elements, its count is 3");
    refused({Verb::kAllToAll, three, four, {}, {}, ReduceOp::kSum, -1, {}}, "cannot be cut into 2 equal parts");
    refused({Verb::kAllToAll, three, four, {1, 1}, {2, 2}, ReduceOp::kSum, -1, {}},
            "the counts of the input must be 2 numbers that add up to its 3 elements");
    refused({Verb::kBroadcast, {}, two, {}, {}, ReduceOp::kSum, 2, {}}, "there is no rank 2 in a group of 2 ranks");
    refused({Verb::kSend, two, {}, {}, {}, ReduceOp::kSum, rank, {}}, "is this rank itself");
    refused({Verb::kGather, two, {}, {}, {}, ReduceOp::kSum, rank, {}}, "gather: the root gives no tensor");
    comm.barrier();  // nobody has been left behind
  });
}

TEST(Verbs, ATransportWithoutAnythingSaysWhatItWouldNeed) {
  Restricted nothing(thread_communicators(2)[0], {}, false);
  const std::string text = error_of([&] { nothing.all_reduce(at::zeros({2}), ReduceOp::kSum); });
  EXPECT_TRUE(says(text, "restricted carries neither"));
  EXPECT_TRUE(says(text, "all_to_all, or send and recv"));
  EXPECT_TRUE(says(error_of([&] { nothing.send(at::zeros({2}), 1); }), "has no send"));
}

TEST(Verbs, SixteenBitSumsAreFormedInFp32AndRoundedOnce) {
  for (const std::string transport : {"thread", "shm", "send_and_recv_only", "all_to_all_only"})
    on_transport(transport, 5, [&](int rank, Communicator& comm) {
      for (const int64_t numel : {10, 40000}) {
        const at::Tensor mine = at::full({numel}, rank == 0 ? 256.0 : 1.0, at::kBFloat16);
        comm.all_reduce(mine, ReduceOp::kSum)->wait();  // step by step in bf16 it would stay at 256
        EXPECT_TRUE(at::equal(mine, at::full({numel}, 260.0, at::kBFloat16))) << transport;
      }
    });
}

TEST(Verbs, MessagesThatDoNotFitAreNamed) {
  on_transport("thread", 2, [](int rank, Communicator& comm) {
    if (rank == 0) comm.send(at::zeros({4}), 1)->wait();
    if (rank == 1) {
      const std::string text = error_of([&] { comm.recv(at::zeros({3}), 0)->wait(); });
      EXPECT_TRUE(says(text, "rank 0 sent 4 x Float, rank 1 receives 3 x Float"));
    }
    comm.barrier();
  });
}

TEST(Verbs, CountTheirTraffic) {
  on_transport("send_and_recv_only", 4, [](int rank, Communicator& comm) {
    const at::Tensor small = at::ones({8}), large = at::ones({32});
    comm.all_reduce(small, ReduceOp::kSum)->wait();
    comm.reduce_scatter(large, small)->wait();
    comm.all_gather(small, large)->wait();
    comm.broadcast(small, 1)->wait();
    comm.all_to_all(large, at::empty({32}))->wait();
    EXPECT_EQ(comm.traffic().calls, 5);  // not those that they are made of
    EXPECT_EQ(comm.traffic().elements, 12 + 24 + 24 + 8 + 24);
    EXPECT_EQ(comm.traffic().bytes, 4 * (12 + 24 + 24 + 8 + 24));
  });
}

}  // namespace
}  // namespace ds::comm
