// A way to add up gradients that a rule names: a file with two registrations, and nothing else in the core. Ranks are
// threads. The ways of the core are compared with one process in reduction_test.cpp and param_space_test.cpp.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "../error_of.h"
#include "../on_threads.h"
#include "comm/transports/thread_communicator.h"
#include "plan/spaces/space_rule.h"
#include "small_engine.h"
#include "zero/gradients/ways/reduce_way.h"

namespace ds::zero {
namespace {

// Every rank gets the slots of all ranks, adds them up and keeps its row. It counts what the core asks of it.
class AddsUp : public ReduceWay {
 public:
  AddsUp(const WayParts& parts, ReduceWayPtr inner) : parts_(parts), inner_(std::move(inner)) {}

  void start(GradBucket& bucket, at::Tensor sent) override {
    const comm::CommunicatorPtr& ranks = parts_.ranks(bucket).shard;
    all_ = at::empty({ranks->size(), bucket.numel}, sent.options());
    bucket.work = ranks->all_gather(sent, all_, bucket.name);
  }
  void receive(GradBucket& bucket) override {
    const plan::Bucket& plan = bucket.plan;
    const int64_t numel = plan.shard_end - plan.shard_begin, begin = parts_.space(bucket).rank() * numel;
    bucket.received = all_.narrow(1, begin, numel).sum(0);
    bucket.slots = bucket.wire = at::Tensor();
  }
  void finish(GradBucket&) override { ++finished; }
  at::Tensor sum_now(const GradBucket& bucket, const at::Tensor& values) override {
    return inner_->sum_now(bucket, values);
  }

  static thread_local int finished;

 private:
  const WayParts parts_;
  const ReduceWayPtr inner_;
  at::Tensor all_;
};
thread_local int AddsUp::finished = 0;

const ReduceWayRegistration way({"test adds up", 5, [](const WayParts&, const BucketFacts&) { return false; },
                                 [](const WayParts& parts, const std::function<ReduceWayPtr()>& inner) -> ReduceWayPtr {
                                   return std::make_shared<AddsUp>(parts, inner());
                                 }});

plan::SpaceAxes named(const plan::SpaceQuery& query, const std::string& way) {
  plan::SpaceAxes made = plan::space_axes({query.grid, "dense", query.shards});
  made.way = way;
  return made;
}
const plan::SpaceRuleRegistration rule({"test way",
                                        [](const plan::SpaceQuery& query) { return named(query, "test adds up"); }});
const plan::SpaceRuleRegistration wrong({"test unknown way", [](const plan::SpaceQuery& query) {
                                           return named(query, "test no such way");
                                         }});

std::vector<at::Tensor> trained(const std::string& rule, int stage, int rank, const comm::CommunicatorPtr& comm,
                                bool blocks = false) {
  std::vector<at::Tensor> params;
  std::vector<ParamSpec> specs;
  for (int i = 0; i < 3; ++i) {
    params.push_back(at::linspace(-1, 1, 5 + 2 * i).set_requires_grad(true));
    specs.push_back({params[i], "weight" + std::to_string(i), 0, i});
    specs.back().rule = rule;
  }
  EngineOptions options;
  options.policy = stage_policy(stage);
  options.reducer.bucket_numel = 6;  // several buckets
  options.reducer.blocks = blocks;
  options.reducer.predivide = 1.0 / comm->size();
  const auto engine = engine_of(specs, options, {comm});
  for (int micro = 0; micro < 2; ++micro) {  // the second sum is added to the first
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& param : params) loss = loss + (param * (1.0 + rank + micro)).tanh().sum();
    run_backward(*engine, loss);
  }
  std::vector<at::Tensor> grads;
  for (size_t param = 0; param < params.size(); ++param)
    grads.push_back(engine->states().full(StateKind::kGrad, 0, param));
  engine->release();
  return grads;
}

TEST(Ways, ARuleNamesAWayOfItsOwn) {
  for (int stage : {1, 2})
    for (int world : {1, 2, 3}) {
      SCOPED_TRACE("stage " + std::to_string(stage) + ", " + std::to_string(world) + " ranks");
      const auto plain = comm::thread_communicators(world), other = comm::thread_communicators(world);
      on_threads(world, [&](int rank) {
        const auto expected = trained("dense", stage, rank, plain[rank]);
        AddsUp::finished = 0;
        const auto found = trained("test way", stage, rank, other[rank]);
        if (world > 1) {
          EXPECT_GE(AddsUp::finished, 6);  // three buckets or more, twice
        } else {
          EXPECT_EQ(AddsUp::finished, 0);  // a bucket is its own sum
        }
        for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-6, 1e-7)) << i;
      });
    }
}

// On one host: 8 bits, so that a rank's gradient, of at most 3 / world, is off by half of a 127th.
TEST(Ways, BlocksAreTheSumButForHalfAScale) {
  for (int stage : {1, 2})
    for (int world : {2, 3}) {
      SCOPED_TRACE("stage " + std::to_string(stage) + ", " + std::to_string(world) + " ranks");
      const auto plain = comm::thread_communicators(world), other = comm::thread_communicators(world);
      on_threads(world, [&](int rank) {
        const auto expected = trained("dense", stage, rank, plain[rank]);
        const auto found = trained("dense", stage, rank, other[rank], true);
        double off = 0;
        for (size_t i = 0; i < found.size(); ++i)
          off = std::max(off, (found[i] - expected[i]).abs().max().item<double>());
        EXPECT_GT(off, 1e-5);
        EXPECT_LE(off, 2 * (1.0 + world) * 0.51 / 127);  // two reductions
      });
    }
}

TEST(Ways, AnUnknownNameIsAnErrorWithTheNamesThatThereAre) {
  const std::string text = error_of([] { trained("test unknown way", 1, 0, comm::local_communicator()); });
  EXPECT_TRUE(says(text, "'test no such way' is not a way to reduce gradients"));
  EXPECT_TRUE(says(text, "rows, test adds up, in place, own, by host, replicas, blocks, scatter, whole"));
}

}  // namespace
}  // namespace ds::zero
