// ZeRO++: gathers that read codes of the slices (qwZ) and a second copy inside groups of ranks (hpZ), and frozen slices
// that rest as codes (MixZ++). Ranks are threads. The measure is stage 3 without them, bit by bit, or one plain process
// that computes with decoded weights.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include "../comm/thread_job.h"
#include "../every_case.h"
#include "plan/shard_map.h"
#include "trained_ranks.h"

namespace ds::zero {
namespace {

struct Case {
  int world, inner;  // ranks, and those that have a second copy together; 1: there is none
  bool codes, peers;
  at::ScalarType type = at::kFloat;
  storage::Medium rest = storage::Medium::kDevice;  // of slices
  bool frozen = false;                              // the last weights are, and rest as codes
};

std::string named(const Case& c) {
  return words("world", c.world, "inner", c.inner, "codes", c.codes, "peers", c.peers, "type", c10::toString(c.type),
               "rest", static_cast<int>(c.rest), "frozen", c.frozen);
}

comm::ProcessMeshPtr mesh_of(comm::Meeting& meeting, int rank, const Case& c) {
  const plan::ProcessGrid grid(c.world, {{"pp", 1, ""}, {"dp", 0, ""}, {"sp", 1, ""}, {"tp", 1, ""}});
  auto found = std::make_shared<comm::ProcessMesh>(grid, comm::job_of(rank, c.world, meeting));
  if (c.inner > 1) found->fold("hpz", {"dp", "sp"}, {{"groups", 0, ""}, {"inner", c.inner, ""}});
  return found;
}

// One weight is longer than a block of codes.
Program program_of(const Case& c) {
  Program made = small_program(5, one, /*alike=*/true);
  made.begin[2] = values(2, {700 + 31, 3});
  made.each_alone = true;
  if (c.frozen) made.trained = 3;
  return made;
}

EngineOptions options_of(const Case& c) {
  EngineOptions options = small_options(3);
  options.codes_weights = c.codes;
  options.codes_frozen = c.frozen;
  options.placements.lp.rest = c.rest;
  options.placements.lp.work = c.rest;
  return options;
}

std::vector<Trained> train(const Case& c, int steps, bool late = false) {
  comm::Meeting meeting(/*waits=*/false, c.peers);
  return on_ranks<Trained>(c.world, [&](int rank) {
    EngineOptions options = options_of(c);
    if (late) options.codes_frozen = false;
    TrainingRank made(program_of(c), c.type, options, mesh_of(meeting, rank, c));
    if (late) made.engine->code_frozen();
    for (int step = 0; step < steps; ++step) made.step(step, adam_inputs(0.3f));
    return made.finish();
  });
}

// The values of `whole` after its slices, cut over `world` ranks, were coded.
at::Tensor decoded(const at::Tensor& whole, int world, const SliceCodec& codec) {
  const at::Tensor flat = whole.detach().reshape({-1}).contiguous();
  const int64_t slice = plan::slice_numel(flat.numel(), world);
  const at::Tensor padded = at::zeros({slice * world}, flat.options());
  padded.narrow(0, 0, flat.numel()).copy_(flat);
  for (int rank = 0; rank < world; ++rank) {
    const at::Tensor values = padded.narrow(0, rank * slice, slice);
    const at::Tensor row = at::empty({codec.row_bytes(slice)}, at::kByte);
    codec.encode({SliceCodec::pair(values, row)});
    codec.decode({SliceCodec::pair(values, row)});
  }
  return padded.narrow(0, 0, flat.numel()).reshape(whole.sizes());
}

TEST(ZeroPP, SecondCopiesChangeNoBit) {
  NewPairs sample;
  for (int world : {2, 4, 6, 8})
    for (int inner : {2, 3, 4})
      for (bool peers : {true, false})
        for (at::ScalarType type : {at::kFloat, at::kBFloat16})
          for (storage::Medium rest : {storage::Medium::kDevice, storage::Medium::kHost}) {
            if (world % inner != 0) continue;
            if (!sample({world, inner, peers, static_cast<int>(type), static_cast<int>(rest)})) continue;
            Case c{world, inner, false, peers, type, rest};
            const auto found = train(c, 4);
            c.inner = 1;
            const auto expected = train(c, 4);
            for (int rank = 0; rank < world; ++rank) expect_same(found[rank], expected[rank], named(c));
          }
}

TEST(ZeroPP, CodesBesideSecondCopiesChangeNoBit) {
  for (bool peers : {true, false})
    for (int world : {4, 8}) {
      const Case c{world, 2, true, peers, at::kBFloat16};
      Case plain = c;
      plain.inner = 1;
      const auto found = train(c, 4), expected = train(plain, 4);
      for (int rank = 0; rank < world; ++rank) expect_same(found[rank], expected[rank], named(c));
    }
}

// One process that computes gradients at decoded weights, and updates the weights themselves.
TEST(ZeroPP, TrainsAtDecodedWeights) {
  const SliceCodecPtr codec = SliceCodec::travelling(at::kCPU, 1);
  for (bool peers : {true, false})
    for (int world : {2, 3, 4}) {
      const Case c{world, 1, true, peers};
      const Program program = program_of(c);
      const auto found = train(c, 4);
      std::vector<at::Tensor> weights;
      for (const at::Tensor& value : program.begin) weights.push_back(value.detach().clone());
      PlainAdamW optimizer;
      for (int step = 0; step < 4; ++step) {
        std::vector<at::Tensor> used, grads;
        for (const at::Tensor& weight : weights) used.push_back(decoded(weight, world, *codec).set_requires_grad(true));
        at::Tensor loss = at::zeros({});
        for (int rank = 0; rank < world; ++rank) loss = loss + program.loss(used, step, rank, 0);
        (loss / world).backward();
        for (const at::Tensor& one : used) grads.push_back(one.grad());
        EXPECT_NEAR(found[0].norms[step], optimizer.step(weights, grads, 0.3), 1e-5) << named(c) << step;
      }
      for (int rank = 0; rank < world; ++rank) {
        expect_near(found[rank].masters, weights, 2e-6, named(c));
        std::vector<at::Tensor> used;
        for (const at::Tensor& master : found[rank].masters) used.push_back(decoded(master, world, *codec));
        expect_same(found[rank].params, used, named(c));  // the same bits on all ranks
      }
    }
}

// Values that a caller acquires are the weights themselves, also those that modules hold; modules then have theirs again.
TEST(ZeroPP, AcquiredValuesAreExact) {
  for (bool peers : {true, false})
    for (int inner : {1, 2}) {
      const Case c{4, inner, true, peers, at::kBFloat16};
      comm::Meeting meeting(/*waits=*/false, peers);
      on_threads(c.world, [&](int rank) {
        TrainingRank made(program_of(c), c.type, options_of(c), mesh_of(meeting, rank, c));
        for (int step = 0; step < 2; ++step) made.step(step, adam_inputs());
        ParamGatherer& gatherer = *made.engine->gatherer();
        for (size_t i = 0; i < made.weights.size(); ++i) {
          ShardedParam* param = made.engine->params().spec(i).sharded.get();
          const bool held = param->persistent;
          EXPECT_EQ(held, i == 0);
          const at::Tensor before = held ? made.weights[i].detach().clone() : at::Tensor();
          gatherer.acquire({param});
          const at::Tensor master = made.engine->states().full(StateKind::kMaster, 0, i);
          EXPECT_TRUE(at::equal(made.weights[i].detach(), master.to(c.type))) << named(c) << i;
          gatherer.release({param});
          if (held) EXPECT_TRUE(at::equal(made.weights[i].detach(), before));
        }
      });
    }
}

// A write into gathered values changes what was written, and leaves the rest of the slices as it was.
TEST(ZeroPP, WritesIntoDecodedValues) {
  for (bool peers : {true, false}) {
    const Case c{2, 1, true, peers, at::kBFloat16};
    comm::Meeting meeting(/*waits=*/false, peers);
    on_threads(c.world, [&](int rank) {
      TrainingRank made(program_of(c), c.type, options_of(c), mesh_of(meeting, rank, c));
      made.step(0, adam_inputs());
      const at::Tensor before = made.engine->states().full(StateKind::kMaster, 0, 2);
      made.gather();
      {
        at::NoGradGuard no_grad;
        made.weights[2].index({at::indexing::Slice(0, 2)}).fill_(0.5);
      }
      made.engine->step(adam_inputs());  // without gradients
      const at::Tensor after = made.engine->states().full(StateKind::kMaster, 0, 2);
      EXPECT_TRUE(after.narrow(0, 0, 2).eq(0.5).all().item<bool>());
      EXPECT_TRUE(at::equal(after.narrow(0, 2, 729), before.narrow(0, 2, 729)));
    });
  }
}

TEST(ZeroPP, SecondCopiesHaveTheirFormulasMemory) {
  comm::Meeting meeting;
  const Case c{8, 4, false, true, at::kBFloat16};
  on_threads(c.world, [&](int rank) {
    TrainingRank made(program_of(c), c.type, options_of(c), mesh_of(meeting, rank, c));
    for (const ShardedParamPtr& param : made.engine->params().sharded_params()) {
      EXPECT_EQ(param->copies.second.numel(), 2 * param->padded_numel() / c.inner);
      EXPECT_EQ(param->second_values().numel(), param->slice_numel() * 2);
    }
  });
}

TEST(ZeroPP, FrozenSlicesRestAsCodes) {
  const SliceCodecPtr codec = SliceCodec::resting(at::kCPU, 1);
  for (bool peers : {true, false})
    for (int world : {1, 2, 4})
      for (storage::Medium rest : {storage::Medium::kDevice, storage::Medium::kHost})
        for (at::ScalarType type : {at::kBFloat16, at::kHalf}) {
          const Case c{world, world == 4 ? 2 : 1, world == 4, peers, type, rest, /*frozen=*/true};
          const Program program = program_of(c);
          const auto found = train(c, 3), late = train(c, 3, /*late=*/true);
          for (int rank = 0; rank < world; ++rank) {
            expect_same(found[rank], late[rank], named(c) + "coded later");
            for (size_t i = program.trained; i < program.begin.size(); ++i)
              EXPECT_TRUE(at::equal(found[rank].params[i], decoded(program.begin[i].to(type), world, *codec)))
                  << named(c) << i;
          }
        }
}

TEST(ZeroPP, FrozenSlicesTakeHalfTheMemory) {
  Program program = small_program(1);
  program.begin[0] = values(0, {512, 512});
  program.trained = 0;
  comm::Meeting meeting;
  const Case c{2, 1, false, true, at::kBFloat16, storage::Medium::kDevice, true};
  on_threads(c.world, [&](int rank) {
    TrainingRank made(program, c.type, options_of(c), mesh_of(meeting, rank, c));
    const ShardedParam& param = *made.engine->params().others().front();
    EXPECT_EQ(param.resting_bytes(), param.slice_numel() + param.slice_numel() / 256 * 4);
    EXPECT_FALSE(param.shard().defined());
  });
}

// Decoded values of 16 bits have the same codes again: files of them lose nothing.
TEST(ZeroPP, RestingCodesOfDecodedValuesAreTheSame) {
  const SliceCodecPtr codec = SliceCodec::resting(at::kCPU, 1);
  at::manual_seed(1);
  for (at::ScalarType type : {at::kBFloat16, at::kHalf})
    for (double scale : {1e-3, 1.0, 40.0}) {
      const at::Tensor x = (at::randn({100'000}) * scale).to(type);
      const at::Tensor rows = at::zeros({2, codec->row_bytes(x.numel())}, at::kByte);
      codec->encode({SliceCodec::pair(x, rows[0])});
      codec->decode({SliceCodec::pair(x, rows[0])});
      codec->encode({SliceCodec::pair(x, rows[1])});
      EXPECT_TRUE(at::equal(rows[0], rows[1])) << c10::toString(type) << scale;
    }
}

}  // namespace
}  // namespace ds::zero
