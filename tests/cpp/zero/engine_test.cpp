// The engine with threads as ranks, against plain autograd on the whole batch: stages x worlds x accumulation x kinds
// of parameters. What a rank computes must not depend on how the work was cut.
#include "zero/engine.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cmath>

#include "../error_of.h"
#include "../every_case.h"
#include "../on_threads.h"
#include "base/error.h"
#include "comm/transports/local_communicator.h"
#include "comm/transports/thread_communicator.h"
#include "trained_ranks.h"

namespace ds::zero {
namespace {

constexpr int kIn = 6, kHidden = 10, kOut = 3, kBatch = 8;

// Two layers whose first weight is used twice, one parameter that some batches leave out, one that none uses.
struct Model {
  std::vector<at::Tensor> params;

  explicit Model(std::vector<at::Tensor> weights) : params(std::move(weights)) {}
  Model() {
    for (const auto& shape :
         std::vector<std::vector<int64_t>>{{kHidden, kIn}, {kHidden}, {kOut, kHidden}, {kHidden}, {4}})
      params.push_back(values(static_cast<double>(params.size()), shape).set_requires_grad(true));
  }

  at::Tensor loss(const at::Tensor& input, bool with_optional) const {
    at::Tensor hidden = at::tanh(at::matmul(input, params[0].t()) + params[1]);
    hidden = at::tanh(at::matmul(at::matmul(hidden, params[0]), params[0].t()));
    if (with_optional) hidden = hidden * params[3];
    return at::matmul(hidden, params[2].t()).square().mean();
  }
};

at::Tensor batch(int step) {
  return at::sin(at::arange(kBatch * kIn, at::kFloat).reshape({kBatch, kIn}) * (0.31 + 0.1 * step));
}

struct Case {
  int stage, world, accumulate, groups;
  int64_t bucket;
  bool overlap;
  bool peer_memory = true;
};

// Each rank and micro-step has its part of the batch.
Program program(int parts_of_rank, int world) {
  const int micro = kBatch / world / parts_of_rank;
  return {Model().params, [=](const std::vector<at::Tensor>& weights, int step, int rank, int part) {
            const at::Tensor input = batch(step).narrow(0, (rank * parts_of_rank + part) * micro, micro);
            return Model(weights).loss(input, step % 3 != 1);
          }};
}

// Parameters and norms of every rank against one plain process that has the whole batch.
void compare(const Case& c, int steps, double tolerance) {
  const Trained expected = in_one_process(program(1, 1), steps, 1, 1, 0.05);
  EngineOptions options = small_options(c.stage);
  options.gatherer.persistence_numel = 11;  // some stay gathered, some do not
  options.reducer.bucket_numel = c.bucket;
  options.reducer.overlap = c.overlap;
  const auto found = train_on(
      c.world,
      [&](const comm::ProcessMeshPtr& mesh) {
        TrainingRank rank(program(c.accumulate, c.world), at::kFloat, options, mesh, "adam", c.groups);
        for (int step = 0; step < steps; ++step) {
          rank.engine->backward().register_hooks();
          rank.step(step, adam_inputs(0.05f, false, c.groups), c.accumulate);
        }
        return rank.finish();
      },
      c.peer_memory);
  for (int rank = 0; rank < c.world; ++rank) {
    const std::string what = words("stage", c.stage, "world", c.world, "accumulate", c.accumulate, "rank", rank);
    expect_near(found[rank].params, expected.params, tolerance, what + " parameter");
    expect_norms(found[rank].norms, expected.norms, 1e-5, what);
  }
}

TEST(Engine, EqualsPlainTraining) {
  NewPairs sample;
  for (int stage : {0, 1, 2, 3})
    for (int world : {1, 2, 4})
      for (int accumulate : {1, 2})
        for (int groups : {1, 2})
          for (int64_t bucket : {1, 40, 1000000})
            for (bool overlap : {false, true})
              if (sample({stage, world, accumulate, groups, bucket, overlap}))
                compare({stage, world, accumulate, groups, bucket, overlap}, 12, 2e-6);
}

// Ranks that cannot read each other's memory agree on what to gather.
TEST(Engine, EqualsPlainTrainingWithAgreedGathers) {
  for (int world : {1, 2, 4})
    for (int accumulate : {1, 2}) compare({3, world, accumulate, 2, 40, true, false}, 12, 2e-6);
}

// One rank's graph uses a parameter that the others' do not: the sum must count it once, and nobody may hang.
TEST(Engine, RanksMayUseDifferentParameters) {
  const auto grads = train_on<at::Tensor>(3, [&](const comm::ProcessMeshPtr& mesh) {
    Model model;
    EngineOptions options;
    options.reducer.predivide = 1.0f / 3;
    options.reducer.bucket_numel = 1;
    auto engine = engine_of(specs_of(model.params), options, mesh);
    for (int round = 0; round < 3; ++round) {
      engine->backward().clear_grads();
      engine->backward().register_hooks();
      run_backward(*engine, model.loss(batch(0), mesh->rank({"dp"}) == (round + 1) % 3));
    }
    EXPECT_TRUE(engine->grads().used(3) && !engine->grads().used(4));
    EXPECT_FALSE(model.params[4].grad().defined());
    return model.params[3].grad().clone();
  });
  Model lone;
  lone.loss(batch(0), true).backward();
  for (const at::Tensor& grad : grads) EXPECT_TRUE(at::allclose(grad, lone.params[3].grad() / 3, 1e-5, 1e-8));
}

// A parameter fires once, then suddenly twice after its bucket has left: the late gradient is not lost.
TEST(Engine, LateGradientsArriveInASecondRound) {
  auto comms = comm::thread_communicators(2);
  on_threads(2, [&](int rank) {
    at::Tensor early = at::ones({4}).set_requires_grad(true), late = at::ones({4}).set_requires_grad(true);
    EngineOptions options;
    options.reducer.bucket_numel = 1;
    options.reducer.predivide = 0.5f;
    auto engine = engine_of({{early, "early", 0, 0}, {late, "late", 0, 1}}, options, {comms[rank]});
    for (int round = 0; round < 2; ++round) {
      engine->backward().clear_grads();
      engine->backward().register_hooks();
      engine->backward().begin(true);
      (late.sum() * 2).backward();
      early.sum().backward();
      engine->backward().end();
      EXPECT_EQ(engine->grads().counts().late, 0);
    }
    EXPECT_GT(engine->grads().counts().overlapped, 0);
    engine->backward().clear_grads();
    engine->backward().begin(true);
    (late.sum() * 2).backward();
    early.sum().backward();
    if (rank == 1) (late.sum() * 10).backward();
    engine->backward().end();
    EXPECT_EQ(engine->grads().counts().late, 1);
    EXPECT_TRUE(at::allclose(late.grad(), at::full({4}, 7.0f)));
    EXPECT_TRUE(at::allclose(early.grad(), at::full({4}, 1.0f)));
  });
}

// Each of two ranks has a model of its own, and an engine that takes the mean of their gradients.
template <typename Body>
void on_two_ranks(const Body& body) {
  auto comms = comm::thread_communicators(2);
  on_threads(2, [&](int rank) {
    Model model;
    EngineOptions options;
    options.reducer.predivide = 0.5f;
    body(rank, model, *engine_of(specs_of(model.params), options, {comms[rank]}));
  });
}

// The gradients of `model` are those of the first batches by one rank, each of which counts `weight` times.
void expect_gradients(const Model& model, int batches, double weight) {
  Model whole;
  for (int i = 0; i < batches; ++i) (whole.loss(batch(i), true) * weight).backward();
  for (size_t i = 0; i < 4; ++i)
    EXPECT_TRUE(at::allclose(model.params[i].grad(), whole.params[i].grad(), 1e-5, 1e-7)) << i;
}

TEST(Engine, PlainBackwardOnOutputsTrainsToo) {
  on_two_ranks([](int rank, Model& model, Engine& engine) {
    engine.backward().window()->facts().weight = 3.0;
    const at::Tensor out = model.loss(batch(rank), true);
    EXPECT_EQ(engine.backward().forwarded({out}), 1);
    (out * 2).backward();
    EXPECT_FALSE(engine.grads().active());
    expect_gradients(model, 2, 6 * 0.5);
  });
}

// Nobody announced this backward; the step reduces what it finds.
TEST(Engine, UnannouncedBackwardIsReducedAtTheStep) {
  on_two_ranks([](int rank, Model& model, Engine& engine) {
    engine.backward().register_hooks();
    model.loss(batch(rank), true).backward();
    model.loss(batch(rank), true).backward();
    engine.backward().finish();
    expect_gradients(model, 2, 2 * 0.5);
  });
}

TEST(Engine, TwoBackwardsBeforeAStepAddUp) {
  on_two_ranks([](int rank, Model& model, Engine& engine) {
    for (int round = 0; round < 2; ++round) {
      engine.backward().register_hooks();
      run_backward(engine, model.loss(batch(2 * round + rank), true));
    }
    expect_gradients(model, 4, 0.5);
  });
}

TEST(Engine, AFailedBackwardLeavesNothingBehind) {
  Model model;
  auto engine = engine_of(specs_of(model.params));
  engine->backward().register_hooks();
  engine->backward().begin(true);
  at::Tensor loss = model.loss(batch(0), true);
  loss.backward();
  EXPECT_FALSE(engine->backward().abort());
  EXPECT_FALSE(engine->grads().any());
  run_backward(*engine, model.loss(batch(1), true));
  Model lone;
  lone.loss(batch(1), true).backward();
  EXPECT_TRUE(at::allclose(model.params[0].grad(), lone.params[0].grad()));
}

TEST(Engine, UsersMayEditReplaceAndDropGradients) {
  Model model;
  auto engine = engine_of(specs_of(model.params));
  engine->backward().register_hooks();
  run_backward(*engine, model.loss(batch(0), true));
  {
    at::NoGradGuard no_grad;
    model.params[0].mutable_grad().zero_();
    model.params[1].mutable_grad() = at::ones({kHidden});
    model.params[2].mutable_grad() = at::Tensor();
    model.params[3].mutable_grad().zero_();
  }
  engine->backward().finish();
  EXPECT_FALSE(engine->grads().used(2));
  use_adam(*engine);
  EXPECT_NEAR(engine->step(adam_inputs()).norm, std::sqrt(static_cast<double>(kHidden)), 1e-6);
  EXPECT_EQ(engine->stepper().steps()[2].item<float>(), 0.0f);
}

// One gradient of each rank, in 16 bits: quotients are added up in fp32, in rank order, and rounded once. At stage 0
// the sum is .grad, and what the user does to it is what the step sees.
TEST(Engine, SixteenBitGradientsAreSummedInFp32AndRoundedOnce) {
  constexpr int kNumel = 300;
  for (auto type : {at::kBFloat16, at::kHalf}) {
    for (int world : {1, 2, 3, 4}) {
      std::vector<at::Tensor> own;
      at::Tensor sum = at::zeros({kNumel});
      for (int rank = 0; rank < world; ++rank) {
        own.push_back(at::sin(at::arange(kNumel, at::kFloat) * (0.3 + rank)).to(type));
        sum += (own.back().to(at::kFloat) * (1.0f / static_cast<float>(world))).to(type).to(at::kFloat);
      }
      for (int stage : {0, 1, 2}) {
        auto comms = comm::thread_communicators(world);
        on_threads(world, [&](int rank) {
          at::Tensor weight = at::ones({kNumel}, type).set_requires_grad(true);
          EngineOptions options;
          options.policy = stage_policy(stage);
          options.reducer.bucket_numel = 100;
          options.reducer.predivide = 1.0f / static_cast<float>(world);
          auto engine = engine_of({{weight, "w", 0, 0}}, options, {comms[rank]});
          use_adam(*engine);
          run_backward(*engine, (weight * own[rank]).sum());
          EXPECT_EQ(engine->params().spaces()[0].grad.dtype, type);
          EXPECT_TRUE(at::equal(engine->states().full(StateKind::kGrad, 0, 0), sum.to(type).to(at::kFloat)))
              << "stage " << stage << " world " << world;
          EXPECT_EQ(weight.grad().defined(), stage == 0 || world == 1);
          if (stage == 0) {
            at::NoGradGuard no_grad;
            weight.mutable_grad().zero_();
            weight.mutable_grad().narrow(0, 0, 9).fill_(2.0f);
          }
          const StepReport report = engine->step(adam_inputs(0.0f, true));
          if (stage == 0) {
            EXPECT_NEAR(report.norm, 6.0, 1e-6);
          }
        });
      }
    }
  }
}

// The type may change between backwards: what is there comes along.
TEST(Engine, TheTypeOfGradientsMayChange) {
  at::Tensor weight = at::ones({5}, at::kBFloat16).set_requires_grad(true);
  auto engine = engine_of({{weight, "w", 0, 0}});
  const auto backward = [&] { run_backward(*engine, (weight * 1.0078125f).sum()); };
  backward();
  engine->grads().set_grad_dtype(at::kFloat);
  EXPECT_FALSE(weight.grad().defined());
  backward();
  EXPECT_TRUE(at::equal(engine->states().full(StateKind::kGrad, 0, 0), at::full({5}, 2.015625f)));
  engine->grads().set_grad_dtype(c10::nullopt);
  EXPECT_TRUE(at::equal(weight.grad(), at::full({5}, 2.015625f, at::kBFloat16)));
  engine->backward().begin(true);
  EXPECT_THROW(engine->grads().set_grad_dtype(at::kFloat), Error);
}

TEST(Engine, SixteenBitWeightsHaveMastersAndFp32Accumulation) {
  for (auto type : {at::kBFloat16, at::kHalf}) {
    at::Tensor weight = at::ones({5}, type).set_requires_grad(true);
    EngineOptions options;
    options.grad_dtype = at::kFloat;
    auto engine = engine_of({{weight, "w", 0, 0}}, options);
    use_adam(*engine);
    engine->backward().register_hooks();
    // 1 + 256 x 2^-9 is 1.5 in fp32; in bf16 each addend would be rounded away.
    for (int part = 0; part <= 256; ++part) {
      run_backward(*engine, (weight * (part == 0 ? 1.0 : 1.0 / 512)).sum(), part == 256);
    }
    EXPECT_TRUE(at::equal(engine->params().view(0, engine->params().spaces()[0].grad), at::full({5}, 1.5f)));
    EXPECT_FALSE(weight.grad().defined());
    AdamArgs args = adam_args();
    args.lr = 1e-4;  // too small for a bf16 weight of 1 to move
    EXPECT_FALSE(engine->step(adam_inputs(0.0f, true, 1, args)).skipped);
    const at::Tensor master = engine->states().full(StateKind::kMaster, 0, 0);
    EXPECT_LT(master[0].item<float>(), 1.0f);
    EXPECT_TRUE(at::equal(weight.detach(), master.to(type)));
  }
}

// A schedule moves before it is known whether the step is skipped, unless it waits for the norm.
void expect_no_change_by_overflow(bool norm_first) {
  at::Tensor weight = at::ones({5}).set_requires_grad(true);
  auto engine = engine_of({{weight, "w", 0, 0}});
  use_adam(*engine);
  engine->backward().register_hooks();
  for (double factor : {1.0, HUGE_VAL, std::nan("")}) {
    const at::Tensor before = weight.detach().clone();
    const at::Tensor steps = engine->stepper().steps().clone();
    run_backward(*engine, (weight * factor).sum());
    StepInputs inputs = adam_inputs(0.0f, true);
    inputs.name_nonfinite = true;
    inputs.scaler = {{}, {}};
    inputs.norm_first = norm_first;
    bool moved = false;
    inputs.before_update = [&] {
      moved = true;
      EXPECT_TRUE(at::equal(weight.detach(), before));
    };
    const StepReport report = engine->step(inputs);
    EXPECT_EQ(report.skipped, !std::isfinite(factor));
    EXPECT_EQ(moved, !norm_first || !report.skipped);
    EXPECT_EQ(report.nonfinite.size(), report.skipped ? 1u : 0u);
    if (report.skipped) {
      EXPECT_EQ(report.nonfinite[0], (std::pair<std::string, std::string>{"w", std::isnan(factor) ? "nan" : "inf"}));
    }
    EXPECT_EQ(report.loss_scale->scale, report.skipped ? 32768.0 : 65536.0);
    EXPECT_FALSE(engine->grads().any());
    EXPECT_EQ(at::equal(weight.detach(), before), report.skipped);
    EXPECT_EQ(at::equal(engine->stepper().steps(), steps), report.skipped);
  }
}

TEST(Engine, AnOverflowChangesNothing) {
  expect_no_change_by_overflow(false);
  expect_no_change_by_overflow(true);
}

// After a schedule that raises, and a question for parameters without gradients, all is as before.
TEST(Engine, AStepThatIsRefusedChangesNothing) {
  at::Tensor weight = at::ones({5}).set_requires_grad(true), other = at::ones({2}).set_requires_grad(true);
  auto engine = engine_of({{weight, "w", 0, 0}, {other, "other", 0, 1}});
  use_adam(*engine);
  run_backward(*engine, weight.sum());
  StepInputs raising = adam_inputs();
  raising.before_update = [] { fail(ErrorKind::kRuntime, "the schedule is broken"); };
  EXPECT_THROW(engine->step(raising), Error);
  EXPECT_EQ(engine->unused_params(), std::vector<std::string>{"other"});
  EXPECT_TRUE(at::equal(weight.detach(), at::ones({5})));
  EXPECT_EQ(engine->stepper().steps()[0].item<float>(), 0.0f);
  EXPECT_TRUE(at::equal(weight.grad(), at::ones({5})));
  EXPECT_FALSE(engine->step(adam_inputs()).skipped);
  EXPECT_EQ(engine->stepper().steps()[0].item<float>(), 1.0f);
}

TEST(Engine, MemoryOrderOfParametersIsKept) {
  at::Tensor image = at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast).set_requires_grad(true);
  const at::Tensor values = image.detach().clone();
  auto engine = engine_of({{image, "image", 0, 0}});
  EXPECT_TRUE(image.is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_TRUE(at::equal(image.detach(), values));
  engine->backward().register_hooks();
  run_backward(*engine, (image * values).sum());
  EXPECT_TRUE(at::equal(image.grad(), values));
  engine->release();
  EXPECT_TRUE(at::equal(image.detach(), values));
}

TEST(Engine, RefusesWhatItCannotTrain) {
  const auto make = [](std::vector<ParamSpec> specs) { engine_of(std::move(specs)); };
  at::Tensor p = at::ones({2}).set_requires_grad(true);
  EXPECT_THROW(make({{p, "p", 0, 0}, {p, "again", 0, 1}}), Error);
  EXPECT_THROW(make({{p * 2, "no leaf", 0, 0}}), Error);
  EXPECT_THROW(make({{at::ones({2}, at::kLong), "integers", 0, 0}}), Error);
}

// A frozen model has no optimizer whose parameters could be asked where they are.
TEST(Engine, LooksAtTheDeviceOfAllParameters) {
  const at::Tensor here = at::ones({3}), there = at::empty({3}, at::TensorOptions().device(at::kMeta));
  EngineOptions options;
  options.policy = stage_policy(3);
  const std::vector<ShardedParamPtr> others = {std::make_shared<ShardedParam>(here, "here", 1, 0),
                                               std::make_shared<ShardedParam>(there, "there", 1, 0)};
  EXPECT_TRUE(says(error_of([&] { engine_of({}, options, mesh_over(comm::local_communicator()), others); }),
                   "'here' on cpu, 'there' on meta"));
}

}  // namespace
}  // namespace ds::zero
