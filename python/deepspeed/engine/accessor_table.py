"""Which value of the configuration each plain accessor of the engine returns: its name -> where the value lies.

What is computed from several values is in ``accessors.py``. A feature that this build does not have is off: the
configuration refuses its switch.
"""

import operator

PATHS = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "dump_state": "dump_state",
    "log_level": "log_level",
    "fp16_enabled": "fp16_enabled",
    "bfloat16_enabled": "bfloat16_enabled",
    "fp16_auto_cast": "float16_config.auto_cast",
    "fp16_master_weights_and_gradients": "float16_config.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bfloat16_config.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bfloat16_config.bf16_optimizer_states",
    "optimizer_params": "optimizer_params",
    "optimizer_legacy_fusion": "optimizer_legacy_fusion",
    "scheduler_name": "scheduler_name",
    "scheduler_params": "scheduler_params",
    "prescale_gradients": "prescale_gradients",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "dataloader_drop_last": "dataloader_drop_last",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "sparse_gradients_enabled": "sparse_gradients_enabled",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_optimization_stage": "zero_optimization_stage",
    "reduce_bucket_size": "zero_config.reduce_bucket_size",
    "zero_reduce_bucket_size": "zero_config.reduce_bucket_size",
    "zero_reduce_scatter": "zero_config.reduce_scatter",
    "zero_overlap_comm": "zero_config.overlap_comm",
    "zero_multi_rank_bucket_allreduce": "zero_config.use_multi_rank_bucket_allreduce",
    "zero_contiguous_gradients": "zero_config.contiguous_gradients",
    "zero_round_robin_gradients": "zero_config.round_robin_gradients",
    "zero_ignore_unused_parameters": "zero_config.ignore_unused_parameters",
    "zero_quantized_gradients": "zero_config.zero_quantized_gradients",
    "zeropp_loco_param": "zero_config.zeropp_loco_param",
    "zero_allgather_bucket_size": "zero_config.allgather_bucket_size",
    "zero_allgather_partitions": "zero_config.allgather_partitions",
    "zero_allgather_sequential": "zero_config.allgather_sequential",
    "zero_prefetch_bucket_size": "zero_config.prefetch_bucket_size",
    "zero_max_live_parameters": "zero_config.max_live_parameters",
    "zero_max_reuse_distance": "zero_config.max_reuse_distance",
    "zero_module_granularity_threshold": "zero_config.module_granularity_threshold",
    "zero_param_persistence_threshold": "zero_config.param_persistence_threshold",
    "zero_model_persistence_threshold": "zero_config.model_persistence_threshold",
    "zero_log_trace_cache_warnings": "zero_config.log_trace_cache_warnings",
    "is_sanity_checks_enabled": "zero_config.enable_sanity_checks",
    "mics_shard_size": "mics_shard_size",
    "zero_hpz_partition_size": "zero_config.zero_hpz_partition_size",
    "zero_quantized_weights": "zero_config.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero_config.zero_quantized_nontrainable_weights",
    "zero_gather_16bit_weights_on_model_save": "zero_config.gather_16bit_weights_on_model_save",
    "zero_sub_group_size": "zero_config.sub_group_size",
    "zero_legacy_stage1": "zero_config.legacy_stage1",
    "zero_load_from_fp32_weights": "zero_config.load_from_fp32_weights",
    "zero_elastic_checkpoint": "zero_config.elastic_checkpoint",
    "zero_save_muon_momentum_buffer_in_memory": "zero_config.save_muon_momentum_buffer_in_memory",
    "zero_offload_optimizer": "zero_config.offload_optimizer",
    "zero_offload_param": "zero_config.offload_param",
    "zenflow_config": "zero_config.zenflow",
    "aio_config": "aio_config",
    "checkpoint_serialization_enabled": "checkpoint_config.checkpoint_serialization",
    "checkpoint_tag_validation_enabled": "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail": "checkpoint_tag_validation_fail",
    "load_universal_checkpoint": "load_universal_checkpoint",
    "use_node_local_storage": "use_node_local_storage",
    "amp_enabled": "amp_enabled",
    "amp_params": "amp_params",
    "torch_autocast_enabled": "torch_autocast_enabled",
    "torch_autocast_dtype": "torch_autocast_dtype",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast_lower_precision_safe_modules",
    "elasticity_enabled": "elasticity_enabled",
    "tensor_parallel_config": "tensor_parallel_config",
    "autotp_size": "tensor_parallel_config.autotp_size",
    "graph_harvesting": "graph_harvesting",
    "flops_profiler_recompute_fwd_factor": "flops_profiler_config.recompute_fwd_factor",
    "flops_profiler_module_depth": "flops_profiler_config.module_depth",
    "flops_profiler_top_modules": "flops_profiler_config.top_modules",
    "flops_profiler_output_file": "flops_profiler_config.output_file",
    "autotuning_enabled": "autotuning_config.enabled",
    "autotuning_start_profile_step": "autotuning_config.start_profile_step",
    "autotuning_end_profile_step": "autotuning_config.end_profile_step",
    "autotuning_metric_path": "autotuning_config.metric_path",
    "autotuning_model_info_path": "autotuning_config.model_info_path",
    "autotuning_metric": "autotuning_config.metric",
    "eigenvalue_enabled": "eigenvalue_enabled",
    "eigenvalue_verbose": "eigenvalue_verbose",
    "eigenvalue_max_iter": "eigenvalue_max_iter",
    "eigenvalue_tol": "eigenvalue_tol",
    "eigenvalue_stability": "eigenvalue_stability",
    "eigenvalue_gas_boundary_resolution": "eigenvalue_gas_boundary_resolution",
    "eigenvalue_layer_name": "eigenvalue_layer_name",
    "eigenvalue_layer_num": "eigenvalue_layer_num",
    "pld_enabled": "pld_enabled",
    "pld_params": "pld_params",
    "curriculum_enabled_legacy": "curriculum_enabled_legacy",
    "curriculum_params_legacy": "curriculum_params_legacy",
    "data_efficiency_enabled": "data_efficiency_enabled",
    "data_efficiency_config": "data_efficiency_config",
}


def answers_from(paths):
    """Class decorator: a method for each name, which returns the value at its path below ``self._config``."""

    def add(cls):
        for name, path in paths.items():
            assert name not in vars(cls), f"{name} is in the table and in {cls.__name__}"
            setattr(cls, name, _accessor(cls, name, path))
        return cls

    return add


def _accessor(cls, name, path):
    value = operator.attrgetter(path)

    def accessor(self):
        return value(self._config)

    accessor.__name__, accessor.__qualname__, accessor.__module__ = name, f"{cls.__name__}.{name}", cls.__module__
    accessor.__doc__ = f"``{path}`` of the configuration."
    return accessor
