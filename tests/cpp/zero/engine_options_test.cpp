// Every key that the engine uses reaches its option, and nothing else decides.
#include "zero/engine_options.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include "../error_of.h"
#include "../io/folder.h"
#include "base/error.h"
#include "config/document.h"
#include "config/resolver.h"
#include "config/schema.h"

namespace ds::zero {
namespace {

class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~ScopedVariable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

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

TEST(EngineOptions, DefaultsOfAbsentSectionsAreThoseOfTheirFields) {
  const config::Schema& schema = config::schema(config::Root::kTraining);
  const config::Config config = config::resolve(config::read_text("{}", "test"), schema, {});
  const std::string section = "zero_optimization.offload_optimizer";
  ASSERT_TRUE(config.find(section)->is_null());
  const auto count = config::value_of(config, schema, section + ".buffer_count").get<int64_t>();
  EXPECT_EQ(count, 4);
  EXPECT_EQ(config::value_of(config, schema, section + ".device"), "none");
  EXPECT_THROW(config::value_of(config, schema, section + ".no_such_key"), Error);
  const EngineOptions o = options_of(zero(R"("stage": 1, "placement": {"auto": true, "host_gb": 1})"));
  EXPECT_EQ(o.swapping.leaving_rows, count);
  EXPECT_EQ(o.memory->pinned, config::value_of(config, schema, section + ".pin_memory").get<bool>());
}

TEST(EngineOptions, WhereParametersRest) {
  const io::Folder disk;
  EXPECT_FALSE(options_of(zero(R"("stage": 3)")).placements.moves_params());
  EXPECT_FALSE(options_of(zero(R"("stage": 3, "offload_param": {"device": "none"})")).placements.moves_params());
  EngineOptions o = options_of(zero(R"("stage": 3, "sub_group_size": 7, "offload_param": {"device": "cpu"})"));
  EXPECT_EQ(o.placements.lp.rest, storage::Medium::kHost);
  EXPECT_TRUE(o.placements.lp.pinned);
  EXPECT_EQ(o.swapping.bucket_numel, 7);
  const std::string path = "\"nvme_path\": \"" + disk.path() + "\"";
  RunFacts facts;
  facts.job_rank = 5;
  o = options_of(zero(R"("stage": 3, "offload_param": {"device": "nvme", "pin_memory": false, "buffer_count": 2,
                         "buffer_size": 3, "max_in_cpu": 4, )" +
                      path + "}"),
                 facts);
  EXPECT_EQ(o.placements.lp.rest, storage::Medium::kFile);
  EXPECT_FALSE(o.placements.lp.pinned);
  EXPECT_EQ(o.placements.lp.folder, disk / "zero_stage_3");
  EXPECT_EQ(o.param_offload.rank, 5);
  EXPECT_EQ(o.param_offload.buffers, 2);
  EXPECT_EQ(o.param_offload.buffer_numel, 3);
  EXPECT_EQ(o.param_offload.host_numel, 4);
}

TEST(EngineOptions, HowFilesAreReadAndWritten) {
  const storage::FileAccess usual = options_of("{}").files;
  EXPECT_EQ(usual.transfers.block_bytes, size_t{1} << 20);
  EXPECT_EQ(usual.transfers.queue_depth, 8);
  EXPECT_TRUE(usual.transfers.overlap_events);
  const storage::FileAccess files = options_of(R"({"aio": {"block_size": 8192, "queue_depth": 3, "single_submit": true,
                                                   "overlap_events": false, "intra_op_parallelism": 4}})")
                                        .files;
  EXPECT_EQ(files.transfers.block_bytes, 8192u);
  EXPECT_EQ(files.transfers.queue_depth, 3);
  EXPECT_TRUE(files.transfers.single_submit);
  EXPECT_FALSE(files.transfers.overlap_events);
  EXPECT_EQ(files.threads, 4);
  const ScopedVariable library("DS_CUFILE_LIBRARY", "libcufile_that_is_not_there.so");
  const std::string complaint = error_of([] { options_of(R"({"aio": {"use_gds": true}})"); });
  EXPECT_EQ(complaint.find("aio.use_gds cannot be: "), 0u) << complaint;
  EXPECT_TRUE(says(complaint, "libcufile_that_is_not_there.so"));
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
  // Two ranks share a sequence: a sum over ranks is one over the four groups of them.
  EXPECT_EQ(divided(R"({"sequence_parallel_size": 2})"), std::make_pair(0.125, 1.0));
  EXPECT_EQ(divided(R"({"sequence_parallel_size": 2, "gradient_allreduce_op": "sum"})"), std::make_pair(0.5, 1.0));
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
  o = options_of(R"({"communication_data_type": "bf16", "sequence_parallel_size": 2})", facts);
  EXPECT_EQ(o.reducer.comm_dtype, at::kFloat);
  o = options_of(R"({"seq_parallel_communication_data_type": "fp16", "sequence_parallel_size": 2})", facts);
  EXPECT_EQ(o.reducer.comm_dtype, at::kHalf);
  EXPECT_FALSE(options_of(R"({"seq_parallel_communication_data_type": "fp16"})", facts).reducer.comm_dtype.has_value());
  const char* unchecked = R"({"bf16": {"enabled": true, "check_grad_overflow": false}})";
  EXPECT_FALSE(options_of(unchecked, facts).reducer.find_nonfinite_grads);
}

TEST(EngineOptions, WhereStatesRest) {
  using storage::Medium;
  EngineOptions o = options_of(zero(R"("stage": 2)"));
  EXPECT_EQ(o.placements, Placements{});
  o = options_of(zero(R"("stage": 2, "offload_optimizer": {"device": "none"})"));
  EXPECT_EQ(o.placements, Placements{});
  for (const char* keys :
       {R"("stage": 1, "cpu_offload": true)", R"("stage": 1, "offload_optimizer": {"device": "cpu"})"}) {
    o = options_of(zero(keys));
    EXPECT_EQ(o.placements.master.rest, Medium::kHost) << keys;
    EXPECT_EQ(o.placements.slot.rest, Medium::kHost);
    EXPECT_EQ(o.placements.grad.rest, Medium::kHost);
    EXPECT_TRUE(o.placements.slot.pinned);
    EXPECT_EQ(o.placements.slot.host_share, 1.0);
    EXPECT_EQ(o.swapping.buffer_count, 0);
    EXPECT_EQ(o.swapping.leaving_rows, 4);
    EXPECT_FALSE(o.swapping.own_folder);
  }
  const io::Folder folder;
  RunFacts facts;
  facts.job_rank = 3;  // others of the job may be the same one of their group
  const std::string path = "\"nvme_path\": \"" + folder.path() + "\"";
  const std::string keys = R"("stage": 3, "sub_group_size": 77, "offload_optimizer": {"device": "nvme", "ratio": 0.3,
      "buffer_count": 6, "pipeline_read": true, "fast_init": true, "pin_memory": false, )";
  o = options_of(zero(keys + path + "}"), facts);
  EXPECT_EQ(o.placements.master.rest, Medium::kFile);
  EXPECT_EQ(o.placements.master.folder, folder.path() + "/zero_stage_3/optimizer/rank3");
  EXPECT_EQ(o.placements.slot.host_share, 0.3);
  EXPECT_FALSE(o.placements.slot.pinned);
  EXPECT_EQ(o.swapping.bucket_numel, 77);
  EXPECT_EQ(o.swapping.buffer_count, 6);
  EXPECT_EQ(o.swapping.leaving_rows, 6);
  EXPECT_TRUE(o.swapping.own_folder);
  EXPECT_TRUE(o.swapping.reads_ahead && o.swapping.fast_init);
  EXPECT_FALSE(o.swapping.writes_behind);
}

TEST(EngineOptions, MemoryInsteadOfPlacements) {
  EXPECT_FALSE(options_of(zero(R"("stage": 2, "placement": {"device_gb": 1})")).memory.has_value());
  EngineOptions o = options_of(zero(R"("stage": 2, "placement": {"auto": true, "device_gb": 0.5, "host_gb": 2})"));
  ASSERT_TRUE(o.memory.has_value());
  EXPECT_EQ(o.memory->device, int64_t{1} << 29);
  EXPECT_EQ(o.memory->host, int64_t{1} << 31);
  EXPECT_EQ(o.memory->file, 0);  // no folder
  const io::Folder folder;
  o = options_of(
      zero(R"("stage": 3, "placement": {"auto": true}, "offload_optimizer": {"nvme_path": ")" + folder.path() + "\"}"));
  ASSERT_TRUE(o.memory.has_value());
  EXPECT_EQ(o.memory->device, 0);
  EXPECT_EQ(o.memory->host, INT64_MAX);
  EXPECT_EQ(o.memory->file, INT64_MAX);
  EXPECT_EQ(o.memory->folder, folder.path() + "/zero_stage_3/optimizer/rank0");
}

}  // namespace
}  // namespace ds::zero
