// Every key that the engine uses reaches its option, and nothing else decides.
#include "zero/engine_options.h"

#include <gtest/gtest.h>

#include "config/document.h"
#include "config/resolver.h"
#include "config/schema.h"

namespace ds::zero {
namespace {

EngineOptions options_of(const std::string& text, const RunFacts& facts = {}) {
  config::Options how;
  how.sections_only = true;
  const config::Config config =
      config::resolve(config::read_text(text, "test"), config::schema(config::Root::kTraining), how);
  EXPECT_EQ(config.complaint(), "");
  return engine_options(config, facts);
}

std::string zero(const std::string& keys) { return R"({"zero_optimization": {)" + keys + "}}"; }

TEST(EngineOptions, KeysReachTheirOptions) {
  EngineOptions o = options_of(zero(R"("stage": 2, "reduce_bucket_size": 11, "allgather_bucket_size": 12,
                                       "reduce_scatter": false, "allgather_partitions": false)"));
  EXPECT_EQ(o.policy.stage, 2);
  EXPECT_EQ(o.reducer.bucket_numel, 11);
  EXPECT_EQ(o.allgather_bucket_numel, 12);
  EXPECT_FALSE(o.reducer.scatter);
  EXPECT_FALSE(o.gather.collective);
  o = options_of(zero(R"("stage": 3, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 2,
                         "stage3_param_persistence_threshold": 3, "stage3_model_persistence_threshold": 4,
                         "stage3_prefetch_bucket_size": 5)"));
  EXPECT_EQ(o.policy.stage, 3);
  EXPECT_EQ(o.gatherer.max_live_numel, 1);
  EXPECT_EQ(o.gatherer.max_reuse_numel, 2);
  EXPECT_EQ(o.gatherer.persistence_numel, 3);
  EXPECT_EQ(o.gatherer.model_persistence_numel, 4);
  EXPECT_EQ(o.gatherer.prefetch_numel, 5);
}

TEST(EngineOptions, OverlapsUnlessTheUserSaysNo) {
  for (const char* keys : {"", R"("stage": 1)", R"("overlap_comm": true)", R"("overlap_comm": null)"}) {
    EXPECT_TRUE(options_of(zero(keys)).reducer.overlap) << keys;
    EXPECT_TRUE(options_of(zero(keys)).gather.overlap) << keys;
  }
  EXPECT_TRUE(options_of("{}").reducer.overlap);
  EXPECT_FALSE(options_of(zero(R"("overlap_comm": false)")).reducer.overlap);
  EXPECT_FALSE(options_of(zero(R"("overlap_comm": false)")).gather.overlap);
}

TEST(EngineOptions, WhereGradientsAreDivided) {
  const auto divided = [](const char* text) {
    RunFacts facts;
    facts.ranks = 8;
    const ReducerOptions o = options_of(text, facts).reducer;
    return std::make_pair(o.predivide, o.postscale);
  };
  EXPECT_EQ(divided("{}"), std::make_pair(0.125, 1.0));
  EXPECT_EQ(divided(R"({"gradient_allreduce_op": "sum"})"), std::make_pair(1.0, 1.0));
  EXPECT_EQ(divided(R"({"prescale_gradients": true})"), std::make_pair(1.0, 0.125));
  EXPECT_EQ(divided(R"({"prescale_gradients": true, "gradient_predivide_factor": 2})"), std::make_pair(0.5, 0.25));
}

TEST(EngineOptions, TypesAndFacts) {
  RunFacts facts;
  facts.threads = 3;
  facts.ranks = 2;
  facts.grad_dtype = at::kFloat;
  EngineOptions o = options_of(R"({"communication_data_type": "BF16", "fp16": {"enabled": true}})", facts);
  EXPECT_EQ(o.threads, 3);
  EXPECT_EQ(o.grad_dtype, at::kFloat);
  EXPECT_EQ(o.reducer.comm_dtype, at::kBFloat16);
  EXPECT_TRUE(o.reducer.find_nonfinite_grads);
  o = options_of(R"({"fp16": {"enabled": true}})");  // one rank finds it in the norm
  EXPECT_FALSE(o.reducer.find_nonfinite_grads);
  EXPECT_FALSE(o.reducer.comm_dtype.has_value());
  EXPECT_TRUE(options_of(R"({"bf16": {"enabled": true}})", facts).reducer.find_nonfinite_grads);
  const char* unchecked = R"({"bf16": {"enabled": true, "check_grad_overflow": false}})";
  EXPECT_FALSE(options_of(unchecked, facts).reducer.find_nonfinite_grads);
}

}  // namespace
}  // namespace ds::zero
