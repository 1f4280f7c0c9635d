// Exchanges of tokens for heads over transports with and without shared memory, against a plain loop: worlds 1 to 8,
// odd sizes, any strides, heads that are copied; and their gradients. Ranks are threads.
#include "parallel/sequence_exchange.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <random>

#include "../on_threads.h"
#include "../error_of.h"
#include "comm/transports/counted_communicator.h"
#include "comm/transports/hierarchical_communicator.h"
#include "comm/transports/shm_communicator.h"
#include "comm/transports/thread_communicator.h"
#include "storage/meta_memory.h"

namespace ds::parallel {
namespace {

using plan::HeadRun;
using plan::SequenceCut;

void with_ranks(const std::string& transport, int size,
                const std::function<void(int, const comm::CommunicatorPtr&)>& body) {
  const auto between = comm::thread_communicators(size);
  on_threads(size, [&](int rank) {
    auto made = between[rank];
    comm::GroupFacts facts;
    facts.spare_cores = size % 2 == 0;  // on every machine
    if (transport == "shm") made = comm::shm_communicator(made, std::chrono::seconds(600), facts);
    if (transport == "hierarchical")
      made = comm::hierarchical_communicator(made, std::chrono::seconds(600), facts, rank % 2);
    ASSERT_TRUE(made);
    body(rank, made);
  });
}

struct Case {
  std::vector<int64_t> tokens;
  std::vector<std::vector<HeadRun>> runs;
  int64_t batch, width;
  bool batch_first, heads_first;
  at::ScalarType type;
  int strides;
};

std::vector<HeadRun> runs_of(int64_t heads, int ranks) {
  std::vector<HeadRun> runs;
  for (int rank = 0; rank < ranks; ++rank) runs.emplace_back(heads * rank / ranks, heads * (rank + 1) / ranks);
  return runs;
}

// Runs of `heads` things, of which each run of `readers` query heads reads one.
std::vector<HeadRun> read_runs(const std::vector<HeadRun>& queries, int64_t readers) {
  std::vector<HeadRun> runs;
  for (const auto& [start, stop] : queries)
    runs.emplace_back(stop > start ? start / readers : 0, stop > start ? (stop - 1) / readers + 1 : 0);
  return runs;
}

Case random_case(std::mt19937& random, int ranks, bool even) {
  const auto below = [&](int most) { return static_cast<int64_t>(random() % static_cast<unsigned>(most)); };
  Case made;
  const int64_t even_tokens = 1 + below(6);
  for (int rank = 0; rank < ranks; ++rank) made.tokens.push_back(even ? even_tokens : below(6));
  const int64_t readers = 1 + below(3), kv = 1 + below(5);
  const auto queries = runs_of(readers * kv, ranks);
  made.runs = {queries, read_runs(queries, readers), read_runs(queries, readers)};
  made.batch = 1 + below(3);
  made.width = below(4) == 0 ? 0 : 1 + below(9);
  made.batch_first = below(2) == 0;
  made.heads_first = below(2) == 0;
  const at::ScalarType types[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  made.type = types[below(4)];
  made.strides = static_cast<int>(below(4));
  return made;
}

// Whole numbers that tell batch, token, head and feature apart, small enough for sums of copies in 8 bits.
double number(int64_t tensor, int64_t b, int64_t s, int64_t h, int64_t d) {
  return static_cast<double>((tensor * 37 + b * 11 + s * 7 + h * 5 + d * 3) % 29 - 14);
}

std::vector<int64_t> shape_of(const Case& c, int64_t tokens, int64_t heads) {
  std::vector<int64_t> shape =
      c.batch_first ? std::vector<int64_t>{c.batch, tokens, heads} : std::vector<int64_t>{tokens, c.batch, heads};
  if (c.width) shape.push_back(c.width);
  return shape;
}

// The box of the whole tensor that starts at `token` and `head`.
at::Tensor filled(const Case& c, int64_t tensor, int64_t token, int64_t tokens, int64_t head, int64_t heads) {
  const at::Tensor made = at::empty(shape_of(c, tokens, heads), at::kDouble);
  double* next = made.data_ptr<double>();
  for (int64_t i = 0; i < made.size(0); ++i)
    for (int64_t j = 0; j < made.size(1); ++j)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < std::max<int64_t>(c.width, 1); ++d)
          *next++ = number(tensor, c.batch_first ? i : j, token + (c.batch_first ? j : i), head + h, d);
  return made.to(c.type);
}

// The same values with other strides.
at::Tensor restrided(const at::Tensor& tensor, int kind) {
  const int64_t last = tensor.dim() - 1;
  if (kind == 1) return tensor.transpose(1, 2).contiguous().transpose(1, 2);
  if (kind == 2) return at::cat({tensor, tensor}, last).narrow(last, 0, tensor.size(last));
  if (kind == 3) return tensor.transpose(0, last).contiguous().transpose(0, last);
  return tensor;
}

// The values of the ranks that read a head, added up.
at::Tensor times_readers(const Case& c, const at::Tensor& part, size_t tensor) {
  std::vector<double> readers(static_cast<size_t>(part.size(2)));
  for (const auto& [start, stop] : c.runs[tensor])
    for (int64_t head = start; head < stop; ++head) readers[head] += 1;
  at::Tensor scale = at::tensor(readers, at::kDouble).view({1, 1, -1});
  if (c.width) scale = scale.unsqueeze(-1);
  return (part.to(at::kDouble) * scale).to(part.scalar_type());
}

void compare_rank(const comm::CommunicatorPtr& group, const Case& c) {
  const int me = group->rank();
  const auto exchange = std::make_shared<SequenceExchange>(group);
  const auto layout = std::make_shared<const SequenceLayout>(
      SequenceLayout{SequenceCut(c.tokens, c.runs), c.batch_first ? 1 : 0, c.heads_first});
  const SequenceCut& cut = layout->cut;
  const int64_t first = cut.in_whole(0, me, me).token;
  std::vector<at::Tensor> parts, wholes;
  for (size_t i = 0; i < c.runs.size(); ++i) {
    const auto t = static_cast<int64_t>(i);
    parts.push_back(restrided(filled(c, t, first, cut.tokens(me), 0, cut.all_heads(i)), c.strides));
    wholes.push_back(
        restrided(filled(c, t, 0, cut.length(), c.runs[i][me].first, cut.heads(i, me)), (c.strides + 1) % 4));
  }
  for (auto& tensor : parts) tensor.set_requires_grad(true);
  for (auto& tensor : wholes) tensor.set_requires_grad(true);
  const auto there = exchange->to_heads(parts, layout);
  const auto back = exchange->to_sequence(wholes, layout);
  for (size_t i = 0; i < parts.size(); ++i) {
    ASSERT_TRUE(at::equal(there[i], wholes[i])) << "to heads, tensor " << i;
    ASSERT_TRUE(at::equal(back[i], times_readers(c, parts[i], i))) << "to the sequence, tensor " << i;
    if (c.heads_first) {
      const at::Tensor batch_first = c.batch_first ? there[i] : there[i].transpose(0, 1);
      ASSERT_TRUE(batch_first.transpose(1, 2).is_contiguous());
    }
  }
  // One gradient is missing, and counts as zeros: here that of the last tensor.
  std::vector<at::Tensor> some(there.begin(), there.end() - 1), upper(wholes.begin(), wholes.end() - 1);
  for (auto& tensor : upper) tensor = tensor.detach();
  const auto grads = torch::autograd::grad(some, parts, upper);
  std::vector<at::Tensor> upper_of_parts;
  for (const auto& part : parts) upper_of_parts.push_back(part.detach());
  const auto whole_grads = torch::autograd::grad(back, wholes, upper_of_parts);
  for (size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor expected = times_readers(c, parts[i].detach(), i);
    ASSERT_TRUE(at::equal(grads[i], i + 1 < parts.size() ? expected : at::zeros_like(expected))) << i;
    ASSERT_TRUE(at::equal(whole_grads[i], wholes[i])) << i;
  }
  // Without waiting at once.
  auto later = exchange->start_to_heads(parts, *layout, true),
       also = exchange->start_to_sequence(wholes, *layout, true);
  also.work->wait();
  later.work->wait();
  for (size_t i = 0; i < parts.size(); ++i) {
    ASSERT_TRUE(at::equal(later.tensors[i], there[i]));
    ASSERT_TRUE(at::equal(also.tensors[i], back[i]));
  }
}

TEST(SequenceExchange, EqualsAPlainLoop) {
  for (const std::string transport : {"thread", "shm", "hierarchical"})
    for (int size = transport == "hierarchical" ? 3 : 1; size <= 8; ++size) {
      std::mt19937 random(size);
      std::vector<Case> cases;
      for (int i = 0; i < 8; ++i) cases.push_back(random_case(random, size, i % 2 == 0));
      with_ranks(transport, size, [&](int rank, const comm::CommunicatorPtr& group) {
        for (const Case& c : cases) compare_rank(group, c);
      });
      if (HasFatalFailure()) FAIL() << transport << ", " << size << " ranks";
    }
}

// Larger than a slot of shared memory, so that rows are cut where a slot ends.
TEST(SequenceExchange, RowsAcrossSlots) {
  for (const int size : {2, 3}) {
    Case c{{}, {}, 2, 65, true, true, at::kFloat, 1};
    for (int rank = 0; rank < size; ++rank) c.tokens.push_back(301 + 13 * rank);
    c.runs = {runs_of(7, size), runs_of(7, size)};
    for (const bool heads_first : {false, true}) {
      c.heads_first = heads_first;
      with_ranks("shm", size, [&](int, const comm::CommunicatorPtr& group) { compare_rank(group, c); });
    }
  }
}

// Many slots of shared memory, in rows that begin anywhere in a line, past the caches.
TEST(SequenceExchange, LargeResultsUseTheirMemoryAgain) {
  const at::Tensor whole = at::arange(6143 * 8 * 131, at::kFloat).view({1, 6143, 8, 131});  // 12.9 MB of each rank
  const SequenceLayout layout{SequenceCut({3072, 3071}, {runs_of(8, 2)}), 1, false};
  with_ranks("shm", 2, [&](int rank, const comm::CommunicatorPtr& group) {
    const auto exchange = std::make_shared<SequenceExchange>(group);
    const at::Tensor part = whole.narrow(1, 3072 * rank, 3072 - rank);
    const auto run = [&] {
      auto made = exchange->start_to_heads({part}, layout, false);
      made.work->wait();
      return made.tensors[0];
    };
    at::Tensor first = run();
    EXPECT_TRUE(at::equal(first, whole.narrow(2, 4 * rank, 4)));
    const void* const memory = first.data_ptr();
    const at::Tensor second = run();
    EXPECT_NE(second.data_ptr(), memory);  // the first one is still there
    auto back = exchange->start_to_sequence({first}, layout, false);
    back.work->wait();
    EXPECT_TRUE(at::equal(back.tensors[0], part));
    first = at::Tensor();
    EXPECT_EQ(run().data_ptr(), memory);
    EXPECT_EQ(exchange->calls(), 4);
    EXPECT_EQ(exchange->elements(), 3 * part.numel() + second.numel());
  });
}

// A step that is planned for the host counts them as the layers' while they are in use, then as buffers.
TEST(SequenceExchange, LargeResultsOfPlannedStepsAreKept) {
  for (const bool on_host : {true, false}) {
    storage::MetaMemory memory(1, on_host);
    memory.install();
    memory.set_owner("attention");
    const at::Tensor part = at::empty({1, 1024, 8, 64}, at::TensorOptions().device(at::kMeta).dtype(at::kFloat));
    const SequenceLayout layout{SequenceCut({1024, 1024}, {runs_of(8, 2)}), 1, true};
    const auto exchange = std::make_shared<SequenceExchange>(comm::counted_communicator(0, 2, "sp"));
    constexpr int64_t kBytes = 1024 * 8 * 64 * 4;
    for (int round = 0; round < 2; ++round) {
      const auto made = exchange->start_to_heads({part}, layout, false).tensors;
      EXPECT_EQ(made[0].sizes(), (c10::IntArrayRef{1, 2048, 4, 64}));
      EXPECT_EQ(made[0].stride(1), 64);
      EXPECT_EQ(memory.owned()["attention"], 2 * kBytes);
      EXPECT_EQ(memory.live(), 2 * kBytes);
    }
    EXPECT_EQ(memory.owned()["buffers"], on_host ? kBytes : 0);
  }
}

TEST(SequenceExchange, ViewsToOneNeighbour) {
  for (const std::string transport : {"thread", "shm"})
    with_ranks(transport, 3, [&](int rank, const comm::CommunicatorPtr& group) {
      SequenceExchange exchange(group);
      const at::Tensor all = at::arange(24, at::kFloat).view({4, 6}) + 100.0 * rank;
      const at::Tensor got = at::zeros({4, 3});
      comm::StridedParts::Views give(3), take(3);
      give[(rank + 1) % 3] = {all.narrow(1, 2, 2), all.narrow(0, 1, 2).narrow(1, 0, 2)};
      take[(rank + 2) % 3] = {got};
      exchange.start_views(give, take)->wait();
      const at::Tensor theirs = at::arange(24, at::kFloat).view({4, 6}) + 100.0 * ((rank + 2) % 3);
      EXPECT_TRUE(
          at::equal(got.view({6, 2}), at::cat({theirs.narrow(1, 2, 2), theirs.narrow(0, 1, 2).narrow(1, 0, 2)})));
    });
}

TEST(SequenceExchange, RefusesWhatDoesNotFit) {
  with_ranks("thread", 2, [&](int rank, const comm::CommunicatorPtr& group) {
    SequenceExchange exchange(group);
    const SequenceLayout layout{SequenceCut({2, 2}, {runs_of(4, 2), runs_of(4, 2)}), 1, false};
    const at::Tensor right = at::zeros({1, 2, 4, 3});
    const auto told = [&](const std::vector<at::Tensor>& parts) {
      return error_of([&] { exchange.start_to_heads(parts, layout, false); });
    };
    EXPECT_TRUE(says(told({right}), "an exchange of 2 tensors among 2 ranks got 1 tensors"));
    EXPECT_TRUE(says(told({right, at::zeros({1, 3, 4, 3})}), "tensor 1 of an exchange has shape [1, 3, 4, 3]"));
    EXPECT_TRUE(says(told({right, right.to(at::kDouble)}), "make them one dtype"));
  });
}

// They would read what nobody has written.
TEST(SequenceExchange, RanksThatDisagreeHearOfEachOther) {
  struct Wrong {
    int64_t batch, tokens, heads, width;
    std::string text;
  };
  for (const Wrong& wrong : {Wrong{2, 5, 4, 3, "[2, 10, 4+4, 3]"}, Wrong{3, 4, 4, 3, "[3, 8, 4+4, 3]"},
                             Wrong{2, 4, 6, 3, "[2, 8, 6+6, 3]"}, Wrong{2, 4, 4, 1, "[2, 8, 4+4, 1]"}})
    for (const bool back : {false, true})
      with_ranks("shm", 2, [&](int rank, const comm::CommunicatorPtr& group) {
        SequenceExchange exchange(group);
        const Wrong mine = rank == 0 ? Wrong{2, 4, 4, 3, ""} : wrong;
        const auto heads = runs_of(mine.heads, 2);
        const SequenceLayout layout{SequenceCut({mine.tokens, mine.tokens}, {heads, heads}), 1, false};
        const auto given = [&](int64_t tokens, int64_t count) {
          const at::Tensor one = at::zeros({mine.batch, tokens, count, mine.width});
          return std::vector<at::Tensor>{one, one};
        };
        const std::string told = error_of([&] {
          auto made = back ? exchange.start_to_sequence(given(2 * mine.tokens, mine.heads / 2), layout, false)
                           : exchange.start_to_heads(given(mine.tokens, mine.heads), layout, false);
          made.work->wait();
        });
        EXPECT_TRUE(says(told, "sequence [2, 8, 4+4, 3]")) << rank << told;
        EXPECT_TRUE(says(told, "sequence " + wrong.text)) << rank << told;
      });
}

}  // namespace
}  // namespace ds::parallel
