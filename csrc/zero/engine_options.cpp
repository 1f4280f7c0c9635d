#include "zero/engine_options.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/ranges.h"
#include "config/resolver.h"
#include "io/folders/swap_files.h"
#include "storage/rates.h"

namespace ds::zero {

namespace {

config::Value key_value(const config::Config& config, const std::string& path) {
  return config::value_of(config, config::schema(config::Root::kTraining), path);
}

// The value of a key that is never null.
template <typename T>
T key(const config::Config& config, const std::string& path) {
  return key_value(config, path).get<T>();
}

// The value of a key that may be null, which says that there is nothing.
template <typename T>
std::optional<T> set_key(const config::Config& config, const std::string& path) {
  const config::Value found = key_value(config, path);
  if (found.is_null()) return std::nullopt;
  return found.get<T>();
}

c10::optional<at::ScalarType> dtype_key(const config::Config& config, const std::string& path) {
  const auto name = set_key<std::string>(config, path);
  if (!name) return c10::nullopt;
  return *name == "fp16" ? at::kHalf : *name == "bf16" ? at::kBFloat16 : at::kFloat;
}

// Whether the user has written `false` there: where a key's own default speaks of the sharded stages alone.
bool switched_off(const config::Config& config, const char* section, const char* name) {
  const config::Value& root = config.document().root;
  const auto found = root.is_object() ? root.find(section) : root.end();
  if (found == root.end() || !found->is_object()) return false;
  const auto value = found->find(name);
  return value != found->end() && value->is_boolean() && !value->get<bool>();
}

// Number of ranks that share a sequence. They train on one sample, so with gradient_allreduce_op "sum" the total is
// divided by it.
int sequence_ranks(const config::Config& config) {
  const auto ranks = set_key<int>(config, "sequence_parallel_size");
  return ranks ? *ranks : 1;
}

void divide(const config::Config& config, int ranks, ReducerOptions& reducer) {
  // The division comes first unless the user says otherwise: then no sum over ranks overflows where that of one process
  // on the whole batch would not, and the loss scale of fp16 does not depend on the number of ranks.
  const double total =
      1.0 / (key<std::string>(config, "gradient_allreduce_op") == "sum" ? sequence_ranks(config) : ranks);
  reducer.predivide =
      key<bool>(config, "prescale_gradients") ? 1.0 / key<double>(config, "gradient_predivide_factor") : total;
  reducer.postscale = total / reducer.predivide;
}

std::string folder_of_states(const config::Config& config, int job_rank, const StagePolicy& policy) {
  const std::string path = "zero_optimization.offload_optimizer.nvme_path";
  const auto base = set_key<std::string>(config, path);
  return io::swap_folder(path, base ? *base : std::string(),
                         "zero_stage_" + std::to_string(policy.stage) + "/optimizer/rank" + std::to_string(job_rank));
}

// Buffers that the user has named, each of a bucket.
int64_t state_buffers(const config::Config& config) {
  return key<int64_t>(config, "zero_optimization.offload_optimizer.buffer_count");
}

// `placement` says how much memory there is.
void read_auto_placement(const config::Config& config, int job_rank, EngineOptions& options) {
  const std::string section = "zero_optimization.placement.", other = "zero_optimization.offload_optimizer.";
  if (!key<bool>(config, section + "auto") || !options.policy.shards_states()) return;
  const auto bytes = [&](const char* name, int64_t without_limit) {
    const auto gib = set_key<double>(config, section + name);
    return gib ? static_cast<int64_t>(*gib * (1 << 30)) : without_limit;
  };
  const auto drive = set_key<std::string>(config, other + "nvme_path");
  const bool files = drive && !drive->empty();
  TierBytes memory{bytes("device_gb", 0), bytes("host_gb", INT64_MAX), files ? bytes("nvme_gb", INT64_MAX) : 0, "",
                   key<bool>(config, other + "pin_memory")};
  options.swapping.own_folder = memory.file > 0;
  if (memory.file > 0) memory.folder = folder_of_states(config, job_rank, options.policy);
  options.swapping.buffer_count = files ? state_buffers(config) : 0;
  options.swapping.leaving_rows = state_buffers(config);
  if (const auto steps = set_key<int64_t>(config, "gradient_accumulation_steps")) memory.accumulation = *steps;
  options.memory = memory;
  // Steps of the host are bound by its memory: more threads than that needs only take cores from others.
  options.threads = storage::known_threads(storage::rates_folder(), options.threads);
}

// Masters, reduced gradients and optimizer states rest together where `offload_optimizer` says.
void place_states(const config::Config& config, int job_rank, EngineOptions& options) {
  const std::string section = "zero_optimization.offload_optimizer.";
  const auto device = key<std::string>(config, section + "device");
  if (device == "none" || !options.policy.shards_states()) return;
  storage::Placement placement;
  placement.rest = device == "cpu" ? storage::Medium::kHost : storage::Medium::kFile;
  placement.pinned = key<bool>(config, section + "pin_memory");
  placement.host_share = key<double>(config, section + "ratio");
  const bool steps_tensors = contains(options.rules, nullptr);
  if (placement.rest == storage::Medium::kFile && steps_tensors) {
    // An optimizer that is not native updates tensors: masters and gradients stay in memory, and its own states go to
    // files between steps (python/deepspeed/zero/states/states_in_files.py).
    placement.rest = storage::Medium::kHost;
    placement.host_share = 1.0;
  }
  Swapping& swapping = options.swapping;
  swapping.leaving_rows = state_buffers(config);
  if (options.policy.shards_params())
    swapping.bucket_numel = std::max<int64_t>(1, key<int64_t>(config, "zero_optimization.sub_group_size"));
  if (placement.rest == storage::Medium::kFile) {
    swapping.own_folder = true;
    placement.folder = folder_of_states(config, job_rank, options.policy);
    swapping.buffer_count = state_buffers(config);
    swapping.reads_ahead = key<bool>(config, section + "pipeline_read");
    swapping.writes_behind = key<bool>(config, section + "pipeline_write");
    swapping.fast_init = key<bool>(config, section + "fast_init");
  }
  options.placements = {placement, placement, placement, {}};
}

// Slices of parameters rest where `offload_param` says (stage 3).
void place_params(const config::Config& config, const RunFacts& facts, EngineOptions& options) {
  const std::string section = "zero_optimization.offload_param.";
  const auto device = key<std::string>(config, section + "device");
  if (device == "none" || !options.policy.shards_params()) return;
  options.swapping.bucket_numel = std::max<int64_t>(1, key<int64_t>(config, "zero_optimization.sub_group_size"));
  const RemoteOptions remote =
      remote_options(config, device, key<bool>(config, section + "pin_memory"), facts.job_rank);
  options.placements.lp = remote.placement;
  options.param_offload = remote.offload;
}

storage::FileAccess file_access(const config::Config& config) {
  const std::string aio = "aio.";
  storage::FileAccess access;
  access.transfers.block_bytes = static_cast<size_t>(key<int64_t>(config, aio + "block_size"));
  access.transfers.queue_depth = key<int>(config, aio + "queue_depth");
  access.transfers.single_submit = key<bool>(config, aio + "single_submit");
  access.transfers.overlap_events = key<bool>(config, aio + "overlap_events");
  access.threads = key<int>(config, aio + "intra_op_parallelism");
  if (!key<bool>(config, aio + "use_gds")) return access;
  try {
    access.cufile = io::CuFile::open();
  } catch (const Error& error) {
    fail(ErrorKind::kRuntime, "aio.use_gds cannot be: ", error.what(),
         " Leave it out, and tensors pass through the host's memory");
  }
  return access;
}

// An integer or "auto", which is 0.
int64_t interval(const config::Config& config, const std::string& path) {
  const config::Value found = key_value(config, path);
  return found.is_number() ? found.get<int64_t>() : 0;
}

bool saves_nonfinite(const config::Config& config) {
  const auto saved = key<std::vector<std::string>>(config, "postmortem.on");
  return std::find(saved.begin(), saved.end(), "nonfinite") != saved.end();
}

// The elements that a step updates at once, and the threads that update the others beside the training.
void choose_strategy(const config::Config& config, const RunFacts& facts, EngineOptions& options) {
  const std::string zero = "zero_optimization.", offload = zero + "offload_optimizer.", flow = zero + "zenflow.";
  const auto share = [&](double of) { return std::max(1, static_cast<int>(facts.threads * of)); };
  if (!key_value(config, zero + "zenflow").is_null()) {
    options.strategy = "zenflow";
    options.placements.grad = {};  // the chosen elements are updated on the device at once
    options.step.threads = share(1.0 - key<double>(config, flow + "pt_reserved_cores_perc"));
    ZenFlowOptions& made = options.step.zenflow;
    const auto select = key<std::string>(config, flow + "select_strategy");
    made.select = select == "step"    ? ZenFlowOptions::Select::kByStep
                  : select == "epoch" ? ZenFlowOptions::Select::kByEpoch
                                      : ZenFlowOptions::Select::kAuto;
    made.topk_ratio = key<double>(config, flow + "topk_ratio");
    made.select_interval = interval(config, flow + "select_interval");
    made.update_interval = interval(config, flow + "update_interval");
    made.overlap = key<bool>(config, flow + "overlap_step");
    made.offload = key<bool>(config, flow + "offload");
    made.auto_ratio = key<double>(config, flow + "auto_ratio");
    made.warm_up = key<int64_t>(config, flow + "full_warm_up_rounds");
    if (const auto steps = set_key<int64_t>(config, flow + "steps_per_epoch")) made.steps_per_epoch = *steps;
  } else if (key<bool>(config, offload + "super_offload")) {
    options.strategy = "speculative";
    options.step.threads = share(key<double>(config, offload + "cpuadam_cores_perc"));
  }
}

}  // namespace

const StagePolicy& policy_of(const config::Config& config) {
  return stage_policy(key<int>(config, "zero_optimization.stage"));
}

EngineOptions engine_options(const config::Config& config, const RunFacts& facts) {
  const std::string zero = "zero_optimization.";
  EngineOptions options;
  options.policy = policy_of(config);
  options.threads = facts.threads;
  options.grad_dtype = facts.grad_dtype;
  options.rules = facts.rules;

  options.reducer.bucket_numel = key<int64_t>(config, zero + "reduce_bucket_size");
  options.reducer.overlap = !switched_off(config, "zero_optimization", "overlap_comm");
  options.reducer.scatter = key<bool>(config, zero + "reduce_scatter");
  options.reducer.blocks = key<bool>(config, zero + "zero_quantized_gradients");
  options.reducer.block_errors = !key_value(config, zero + "zeropp_loco_param").is_null();
  if (options.reducer.block_errors) {
    options.reducer.block_error_beta = static_cast<float>(key<double>(config, zero + "zeropp_loco_param.err_beta"));
    options.reducer.block_reset_steps = key<int64_t>(config, zero + "zeropp_loco_param.reset_T");
  }
  options.reducer.comm_dtype = dtype_key(
      config, sequence_ranks(config) > 1 ? "seq_parallel_communication_data_type" : "communication_data_type");
  const bool checks = key<bool>(config, "fp16.enabled") ||
                      (key<bool>(config, "bf16.enabled") && key<bool>(config, "bf16.check_grad_overflow"));
  // A saved step tells apart gradients that autograd made so and those that a reduction has damaged.
  options.reducer.find_nonfinite_grads = (checks && facts.ranks > 1) || saves_nonfinite(config);
  divide(config, facts.ranks, options.reducer);

  options.gather.overlap = options.reducer.overlap;
  options.gather.collective = key<bool>(config, zero + "allgather_partitions");
  options.allgather_bucket_numel = key<int64_t>(config, zero + "allgather_bucket_size");
  options.gatherer.max_live_numel = key<int64_t>(config, zero + "stage3_max_live_parameters");
  options.gatherer.max_reuse_numel = key<int64_t>(config, zero + "stage3_max_reuse_distance");
  options.gatherer.persistence_numel = key<int64_t>(config, zero + "stage3_param_persistence_threshold");
  options.gatherer.model_persistence_numel = key<int64_t>(config, zero + "stage3_model_persistence_threshold");
  options.gatherer.prefetch_numel = key<int64_t>(config, zero + "stage3_prefetch_bucket_size");
  options.codes_weights = facts.codes_weights || key<bool>(config, zero + "zero_quantized_weights");
  options.codes_frozen = facts.codes_frozen || key<bool>(config, zero + "zero_quantized_nontrainable_weights");
  place_states(config, facts.job_rank, options);
  read_auto_placement(config, facts.job_rank, options);
  choose_strategy(config, facts, options);
  place_params(config, facts, options);
  options.files = file_access(config);
  return options;
}

RemoteOptions remote_options(const config::Config& config, const std::string& device, bool pinned, int rank) {
  const std::string section = "zero_optimization.offload_param.";
  RemoteOptions remote;
  remote.placement.rest = remote.placement.work = device == "cpu" ? storage::Medium::kHost : storage::Medium::kFile;
  remote.placement.pinned = pinned;
  remote.offload.rank = rank;
  remote.files = file_access(config);
  if (device == "cpu") return remote;
  const auto base = set_key<std::string>(config, section + "nvme_path");
  if (!base)
    fail(ErrorKind::kValue, "parameters are to rest on NVMe, and the configuration names no folder: set \"", section,
         "nvme_path\"");
  remote.offload.host_numel = key<int64_t>(config, section + "max_in_cpu");
  remote.offload.buffers = key<int64_t>(config, section + "buffer_count");
  remote.offload.buffer_numel = key<int64_t>(config, section + "buffer_size");
  if (remote.offload.buffers < 1)
    fail(ErrorKind::kValue, section,
         "buffer_count is 0: parameters on NVMe pass through at least one buffer. Set it "
         "to 2 or more, so that one is read while another is used");
  remote.placement.folder = io::swap_folder(section + "nvme_path", *base, "zero_stage_3");
  return remote;
}

}  // namespace ds::zero
