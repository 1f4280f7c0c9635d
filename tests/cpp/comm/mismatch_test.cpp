// Ranks that do not mean the same: every collective over every transport with other shapes, dtypes, counts and roots on
// one rank. All ranks must fail within seconds, and nobody may touch memory that is not the call's (tools/sanitize.sh).
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <numeric>

#include "../error_of.h"
#include "base/error.h"
#include "comm/segments/shared_segments.h"
#include "transports.h"

namespace ds::comm {
namespace {

using namespace testing_transports;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 4, kWrong = 2;  // the rank that is wrong
constexpr std::chrono::seconds kLimit(5);

enum class Fault { kShape, kLargeShape, kDtype, kCounts, kCountsOfEqualSum, kRoot, kReduction };
const char* name_of(Fault fault) {
  constexpr const char* kNames[] = {"shape", "large shape", "dtype", "counts", "counts of equal sum",
                                    "root",  "reduction"};
  return kNames[static_cast<int>(fault)];
}

bool has_root(Verb verb) {
  return verb == Verb::kReduce || verb == Verb::kBroadcast || verb == Verb::kGather || verb == Verb::kScatter;
}
bool has_counts(Verb verb) {
  return verb == Verb::kReduceScatter || verb == Verb::kAllGather || verb == Verb::kAllToAll || verb == Verb::kGather ||
         verb == Verb::kScatter;
}
bool applies(Fault fault, Verb verb) {
  switch (fault) {
    case Fault::kCounts:
    case Fault::kCountsOfEqualSum: return has_counts(verb);
    case Fault::kRoot: return has_root(verb);
    case Fault::kReduction: return verb == Verb::kAllReduce;
    default: return verb != Verb::kBarrier;
  }
}

// The call of `rank`, which fits together on every rank by itself.
Op call(Verb verb, Fault fault, int rank) {
  const bool wrong = rank == kWrong, large = fault == Fault::kLargeShape;
  const int64_t numel = (large ? 50000 : 6) + (wrong && (fault == Fault::kShape || large) ? 2 : 0);
  const auto options = at::TensorOptions().dtype(wrong && fault == Fault::kDtype ? at::kDouble : at::kFloat);
  const int root = wrong && fault == Fault::kRoot ? 1 : 0;
  Op op{verb, {}, {}, {}, {}, wrong && fault == Fault::kReduction ? ReduceOp::kMax : ReduceOp::kSum, root, {}};
  std::vector<int64_t> counts;
  if (fault == Fault::kCounts || fault == Fault::kCountsOfEqualSum) {
    counts = {4, 5, 6, 7};
    if (wrong && fault == Fault::kCounts) counts[kWrong] = 9;
    if (wrong && fault == Fault::kCountsOfEqualSum) std::swap(counts[0], counts[kWrong]);
  }
  int64_t whole = numel * kRanks, mine = numel;
  if (!counts.empty()) {
    whole = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    mine = counts[rank];
  }
  const auto tensor = [&](int64_t count) { return at::ones({count}, options); };
  switch (verb) {
    case Verb::kReduceScatter: op.in = tensor(whole), op.out = tensor(mine), op.in_counts = counts; break;
    case Verb::kAllGather: op.in = tensor(mine), op.out = tensor(whole), op.out_counts = counts; break;
    case Verb::kGather:
      op.in = tensor(mine), op.out_counts = counts;
      if (rank == root) op.out = tensor(whole);
      break;
    case Verb::kScatter:
      op.out = tensor(mine), op.in_counts = counts;
      if (rank == root) op.in = tensor(whole);
      break;
    case Verb::kAllToAll:  // rank r gives and takes counts[r + s] to and from rank s
      if (!counts.empty()) {
        std::vector<int64_t> right(kRanks);
        for (int r = 0; r < kRanks; ++r) right[r] = std::vector<int64_t>{4, 5, 6, 7}[(rank + r) % kRanks];
        op.in_counts = op.out_counts = right;
        if (wrong && fault == Fault::kCounts) op.out_counts[1] += 5;
        if (wrong && fault == Fault::kCountsOfEqualSum) std::swap(op.out_counts[0], op.out_counts[3]);
      }
      op.in = tensor(counts.empty() ? whole : std::accumulate(op.in_counts.begin(), op.in_counts.end(), int64_t{0}));
      op.out = tensor(counts.empty() ? whole : std::accumulate(op.out_counts.begin(), op.out_counts.end(), int64_t{0}));
      break;
    default: op.out = tensor(numel); break;
  }
  return op;
}

// The errors of ranks that have come to the end; nobody leaves before all have, or the time is over.
struct Told {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> errors = std::vector<std::string>(kRanks);
  std::vector<std::string> later = std::vector<std::string>(kRanks);
  int ended = 0;

  void end() {
    std::unique_lock lock(mutex);
    ++ended;
    changed.notify_all();
    changed.wait_for(lock, 2 * kLimit, [&] { return ended == kRanks; });
  }
};

// Transports that compare what all ranks call before data moves. Of the others those fail that see it; as the decorator
// `watched` does they abort the group, and all others fail in their next call.
bool compares(const std::string& transport) {
  return transport == "thread" || begins_with(transport, "shm") || begins_with(transport, "hierarchical") ||
         transport == "all_to_all_only";
}

class Mismatches : public testing::TestWithParam<std::string> {};

TEST_P(Mismatches, FailOnEveryRankWithinSeconds) {
  const std::string& transport = GetParam();
  setenv("DS_COMM_TRACE_DIR", "/nonexistent", 1);
  for (int v = 0; v < kVerbs; ++v) {
    const Verb verb = static_cast<Verb>(v);
    if (verb == Verb::kSend || verb == Verb::kRecv) continue;
    for (const Fault fault : {Fault::kShape, Fault::kLargeShape, Fault::kDtype, Fault::kCounts,
                              Fault::kCountsOfEqualSum, Fault::kRoot, Fault::kReduction}) {
      if (!applies(fault, verb)) continue;
      // A rank that only sends and receives does not see that another takes other ranks' messages for other things.
      if (!compares(transport) && fault == Fault::kRoot) continue;
      if (fault == Fault::kReduction && (!compares(transport) || transport == "all_to_all_only")) continue;
      Told told;
      const auto began = Clock::now();
      on_transport(transport, kRanks, [&](int rank, Communicator& comm) {
        const Op op = call(verb, fault, rank);
        // A rank that still sends messages of the barrier fails there, when another one has aborted the group.
        told.errors[rank] = failure_of([&] {
          comm.barrier();
          comm.run(op)->wait();
        });
        if (!told.errors[rank].empty()) comm.abort(told.errors[rank]);
        if (!compares(transport)) told.later[rank] = failure_of([&] { comm.barrier(); });
        told.end();
      });
      const std::string what = transport + ", " + verb_name(verb) + ", " + name_of(fault);
      EXPECT_LT(Clock::now() - began, kLimit) << what;
      for (int rank = 0; rank < kRanks; ++rank)
        EXPECT_FALSE(told.errors[rank].empty() && told.later[rank].empty()) << what << ": rank " << rank;
    }
  }
  unsetenv("DS_COMM_TRACE_DIR");
}

// A mistake that one rank sees by itself is refused before anything is sent, and breaks nothing.
TEST_P(Mismatches, ThatOneRankSeesAreRefused) {
  if (GetParam() == "local") return;
  const auto mixed = at::TensorOptions().dtype(at::kBFloat16);
  on_transport(GetParam(), kRanks, [&](int rank, Communicator& comm) {
    const at::Tensor part = at::ones({2}), whole = at::ones({2 * kRanks}), narrow = at::ones({2}, mixed),
                     narrow_whole = at::ones({2 * kRanks}, mixed), across = at::ones({2 * kRanks, 2}).t().select(0, 0);
    const auto refused = [&](const Op& op, ErrorKind kind, const std::string& text) {
      EXPECT_TRUE(says(error_of(kind, [&] { comm.run(op)->wait(); }), text));
    };
    const auto op = [&](Verb verb, const at::Tensor& in, const at::Tensor& out) {
      return Op{verb, in, out, {}, {}, ReduceOp::kSum, rank, {}};
    };
    const std::string bf16_in = "the input is BFloat16, the output Float", bf16_out = "the input is Float, the output";
    refused(op(Verb::kAllGather, part, narrow_whole), ErrorKind::kType, bf16_out);
    refused(op(Verb::kAllGather, narrow, whole), ErrorKind::kType, bf16_in);
    refused(op(Verb::kReduceScatter, whole, narrow), ErrorKind::kType, bf16_out);
    refused(op(Verb::kAllToAll, narrow_whole, whole), ErrorKind::kType, bf16_in);
    refused(op(Verb::kGather, part, narrow_whole), ErrorKind::kType, bf16_out);
    refused(op(Verb::kScatter, whole, narrow), ErrorKind::kType, bf16_out);
    refused(op(Verb::kAllGather, part, whole.to(at::kMeta)), ErrorKind::kValue, "move them to one device");
    for (const Verb verb : {Verb::kAllReduce, Verb::kReduce, Verb::kBroadcast})
      refused(op(verb, {}, across), ErrorKind::kValue, "collectives need contiguous tensors");
    refused(op(Verb::kAllGather, part, {}), ErrorKind::kValue, "all_gather: output is missing");
    refused(op(Verb::kReduceScatter, {}, part), ErrorKind::kValue, "reduce_scatter: input is missing");
    refused(op(Verb::kAllReduce, {}, {}), ErrorKind::kValue, "all_reduce: output is missing");
    Op negative = op(Verb::kAllToAll, whole, whole);
    negative.in_counts = negative.out_counts = {-2, 6, 2, 2};
    refused(negative, ErrorKind::kValue, "a count is -2");
    comm.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, Mismatches,
                         testing::Values("thread", "shm", "hierarchical", "nccl", "send_and_recv_only",
                                         "all_to_all_only"),
                         [](const auto& parameter) { return parameter.param; });

TEST(Mismatches, OfSplitSizesAreNamed) {
  setenv("DS_COMM_TRACE_DIR", "/nonexistent", 1);
  on_transport("shm", kRanks, [&](int rank, Communicator& comm) {
    const std::string text =
        failure_of([&] { comm.run(call(Verb::kAllToAll, Fault::kCountsOfEqualSum, rank))->wait(); });
    EXPECT_TRUE(says(text, "a rank gives another one more or less than that one takes from it (split sizes)"));
    EXPECT_TRUE(says(text, "Rank 0 gives rank 2 6 elements, and that one takes 5."));
  });
  unsetenv("DS_COMM_TRACE_DIR");
}

// A file of this process under the number that another one, elsewhere, has told.
TEST(SharedSegments, AreNotTakenForThoseOfAnotherProcess) {
  Rendezvous alone;
  alone.all = [](bool ok) { return ok; };
  for (const bool clone : {false, true}) {
    alone.exchange = [clone](const SegmentFacts& mine) {
      SegmentFacts theirs = mine;
      if (clone) ++theirs.file.nonce;
      return std::vector<SegmentFacts>{mine, theirs};
    };
    EXPECT_EQ(SharedSegments::create(0, 2, 4096, alone) == nullptr, clone);
  }
}

}  // namespace
}  // namespace ds::comm
