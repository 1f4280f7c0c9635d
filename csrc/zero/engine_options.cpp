#include "zero/engine_options.h"

#include <string>

#include "base/error.h"
#include "config/resolver.h"

namespace ds::zero {

namespace {

// The value of a key that every configuration has.
template <typename T>
T key(const config::Config& config, const std::string& path) {
  const config::Value* value = config.find(path);
  if (value == nullptr) fail(ErrorKind::kKey, "the configuration has no key ", path);
  return value->get<T>();
}

c10::optional<at::ScalarType> dtype_key(const config::Config& config, const std::string& path) {
  const config::Value* value = config.find(path);
  if (value == nullptr || value->is_null()) return c10::nullopt;
  const auto name = value->get<std::string>();
  return name == "fp16" ? at::kHalf : name == "bf16" ? at::kBFloat16 : at::kFloat;
}

// Whether the user has written `false` there: where a key's own default speaks of the sharded stages alone.
bool switched_off(const config::Config& config, const char* section, const char* name) {
  const config::Value& root = config.document().root;
  const auto found = root.is_object() ? root.find(section) : root.end();
  if (found == root.end() || !found->is_object()) return false;
  const auto value = found->find(name);
  return value != found->end() && value->is_boolean() && !value->get<bool>();
}

void divide(const config::Config& config, int ranks, ReducerOptions& reducer) {
  // The division comes first unless the user says otherwise: then no sum over ranks overflows where that of one process
  // on the whole batch would not, and the loss scale of fp16 does not depend on the number of ranks.
  const double total = key<std::string>(config, "gradient_allreduce_op") == "sum" ? 1.0 : 1.0 / ranks;
  reducer.predivide =
      key<bool>(config, "prescale_gradients") ? 1.0 / key<double>(config, "gradient_predivide_factor") : total;
  reducer.postscale = total / reducer.predivide;
}

}  // namespace

EngineOptions engine_options(const config::Config& config, const RunFacts& facts) {
  const std::string zero = "zero_optimization.";
  EngineOptions options;
  options.policy = stage_policy(key<int>(config, zero + "stage"));
  options.threads = facts.threads;
  options.grad_dtype = facts.grad_dtype;

  options.reducer.bucket_numel = key<int64_t>(config, zero + "reduce_bucket_size");
  options.reducer.overlap = !switched_off(config, "zero_optimization", "overlap_comm");
  options.reducer.scatter = key<bool>(config, zero + "reduce_scatter");
  options.reducer.comm_dtype = dtype_key(config, "communication_data_type");
  const bool checks = key<bool>(config, "fp16.enabled") ||
                      (key<bool>(config, "bf16.enabled") && key<bool>(config, "bf16.check_grad_overflow"));
  options.reducer.find_nonfinite_grads = checks && facts.ranks > 1;
  divide(config, facts.ranks, options.reducer);

  options.gather.overlap = options.reducer.overlap;
  options.gather.collective = key<bool>(config, zero + "allgather_partitions");
  options.allgather_bucket_numel = key<int64_t>(config, zero + "allgather_bucket_size");
  options.gatherer.max_live_numel = key<int64_t>(config, zero + "stage3_max_live_parameters");
  options.gatherer.max_reuse_numel = key<int64_t>(config, zero + "stage3_max_reuse_distance");
  options.gatherer.persistence_numel = key<int64_t>(config, zero + "stage3_param_persistence_threshold");
  options.gatherer.model_persistence_numel = key<int64_t>(config, zero + "stage3_model_persistence_threshold");
  options.gatherer.prefetch_numel = key<int64_t>(config, zero + "stage3_prefetch_bucket_size");
  return options;
}

}  // namespace ds::zero
