"""The plain accessors of the engine: name -> path of the value of the configuration that it returns.

What is computed from several values is in ``accessors.py``. A feature that this build does not have is off: the
configuration refuses its switch.
"""

# Accessors that are called like the value.
_SAME = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "fp16_enabled",
    "bfloat16_enabled", "optimizer_params", "optimizer_legacy_fusion", "scheduler_name", "scheduler_params",
    "prescale_gradients", "gradient_predivide_factor", "dataloader_drop_last", "managed_gradient_accumulation",
    "sparse_gradients_enabled", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization_stage", "mics_shard_size", "aio_config", "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail", "load_universal_checkpoint", "use_node_local_storage", "amp_enabled",
    "amp_params", "torch_autocast_enabled", "torch_autocast_dtype", "torch_autocast_lower_precision_safe_modules",
    "elasticity_enabled", "tensor_parallel_config", "graph_harvesting", "eigenvalue_enabled", "eigenvalue_verbose",
    "eigenvalue_max_iter", "eigenvalue_tol", "eigenvalue_stability", "eigenvalue_gas_boundary_resolution",
    "eigenvalue_layer_name", "eigenvalue_layer_num", "pld_enabled", "pld_params", "curriculum_enabled_legacy",
    "curriculum_params_legacy", "data_efficiency_enabled", "data_efficiency_config",
)  # fmt: skip
# Accessors of one section: prefix of the accessor's name -> keys that follow it.
_PREFIXED = {
    ("zero_config", "zero_"): (
        "reduce_bucket_size", "reduce_scatter", "overlap_comm", "contiguous_gradients", "round_robin_gradients",
        "ignore_unused_parameters", "allgather_bucket_size", "allgather_partitions", "allgather_sequential",
        "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance", "module_granularity_threshold",
        "param_persistence_threshold", "model_persistence_threshold", "log_trace_cache_warnings",
        "sub_group_size", "legacy_stage1", "load_from_fp32_weights",
        "elastic_checkpoint", "save_muon_momentum_buffer_in_memory", "offload_optimizer", "offload_param",
    ),
    ("flops_profiler_config", "flops_profiler_"): (
        "recompute_fwd_factor", "module_depth", "top_modules", "output_file",
    ),
    ("autotuning_config", "autotuning_"): (
        "enabled", "start_profile_step", "end_profile_step", "metric_path", "model_info_path", "metric",
    ),
    ("pld_params", "pld_"): (
        "theta", "gamma",
    ),
}  # fmt: skip
PATHS = {
    **{name: name for name in _SAME},
    **{prefix + key: f"{section}.{key}" for (section, prefix), keys in _PREFIXED.items() for key in keys},
    "fp16_auto_cast": "float16_config.auto_cast",
    "fp16_master_weights_and_gradients": "float16_config.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bfloat16_config.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bfloat16_config.bf16_optimizer_states",
    "reduce_bucket_size": "zero_config.reduce_bucket_size",
    "zero_multi_rank_bucket_allreduce": "zero_config.use_multi_rank_bucket_allreduce",
    "zero_quantized_gradients": "zero_config.zero_quantized_gradients",
    "zeropp_loco_param": "zero_config.zeropp_loco_param",
    "is_sanity_checks_enabled": "zero_config.enable_sanity_checks",
    "zero_hpz_partition_size": "zero_config.zero_hpz_partition_size",
    "zero_quantized_weights": "zero_config.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero_config.zero_quantized_nontrainable_weights",
    "zenflow_config": "zero_config.zenflow",
    "checkpoint_serialization_enabled": "checkpoint_config.checkpoint_serialization",
    "autotp_size": "tensor_parallel_config.autotp_size",
    "zero_optimization": "zero_enabled",
    "data_sampling_config": "data_efficiency_config.data_sampling",
    "data_sampling_enabled": "data_efficiency_config.data_sampling.enabled",
    "curriculum_learning_config": "data_efficiency_config.data_sampling.curriculum_learning",
    "curriculum_learning_enabled": "data_efficiency_config.data_sampling.curriculum_learning.enabled",
    "random_ltd_config": "data_efficiency_config.data_routing.random_ltd",
    "is_deepcompile_enabled": "compile_config.deepcompile",
    # Values of a section that may be absent, each with the value that is returned then.
    "zero_partial_offload": ("zero_config.offload_optimizer.ratio", 0.0),
    "super_offload": ("zero_config.offload_optimizer.super_offload", False),
}
# Accessors of values that the engine itself has.
OWN_PATHS = {
    "get_global_grad_norm": "_steps.norm",
    "was_step_applied": "_steps.applied",
    "get_data_parallel_rank": "parallel.data_rank",
    "get_model_parallel_rank": "parallel.mp_rank",
    "get_tensor_parallel_rank": "parallel.mp_rank",
    "mp_rank_for_files": "parallel.mp_rank",
    "get_sequence_parallel_group": "seq_parallel_group",
}
