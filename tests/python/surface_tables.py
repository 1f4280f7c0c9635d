"""What of the published interface is not here, and why. A row goes when the name comes: the test says so.

Names are written "module", "module:name" or "module:name.member".
"""

# Parameters with defaults that only ours have: "class" or "class.method" -> names.
OWN_PARAMETERS = {
    "DeepSpeedConfig": ["world_size"],
    "DeepSpeedEngine.zero_grad": ["set_to_none"],
    "BF16_Optimizer": ["engine"],
    "DeepSpeedZeroOptimizer": ["engine"],
    "DeepSpeedZeroOptimizer_Stage3": ["engine", "mem_efficient_linear"],
    "DeepSpeedZeRoOffload": ["core", "mem_efficient_linear"],
    "FPDT_Attention": ["folder"],
    "MoE": ["balance", "aux_scope", "z_loss_coeff"],
    "PipelineModule": ["virtual_stages", "placement", "profile_input"],
    "PipelineModule.forward": ["chunk"],
    "UlyssesSPDataLoaderAdapter": ["pad"],
}

# Members of objects by the list data/engine_members.json: feature that is still to be built -> "class.member".
ABSENT_MEMBERS = {
    "DeepCompile": ["DeepSpeedEngine.get_compile_time"],
    "data efficiency and curriculum learning": [
        "DeepSpeedEngine.random_ltd_scheduler",
        "DeepSpeedEngine.set_custom_curriculum_learning_schedule",
    ],
    "inference": ["InferenceEngine.cuda_graph_created"],
}

# Feature that is still to be built -> its names.
LATER = {
    "DeepCompile": [
        "deepspeed.runtime.engine:DeepSpeedEngine.compile_autosp",
        "deepspeed.runtime.engine:DeepSpeedEngine.compile_autotp",
        "deepspeed.runtime.engine:DeepSpeedEngine.compile_zero_optimization_stage",
        "deepspeed.runtime.engine:DeepSpeedEngine.get_autosp_backend",
        "deepspeed.runtime.engine:DeepSpeedEngine.get_autotp_backend",
        "deepspeed.runtime.engine:DeepSpeedEngine.get_compile_time",
        "deepspeed.runtime.engine:DeepSpeedEngine.get_deepcompile_backend",
        "deepspeed.runtime.engine:DeepSpeedEngine.get_deepspeed_compile_backend",
        "deepspeed.runtime.engine:DeepSpeedEngine.register_compile_pass",
        "deepspeed.runtime.engine:DeepSpeedEngine.uses_parallelization_pass_only",
    ],
    "mixture of experts": [
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer.configure_autoep_folding_tp_gradient_reduction",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.configure_autoep_folding_tp_gradient_reduction",
    ],
    "data efficiency and curriculum learning": [
        "deepspeed.runtime.engine:DeepSpeedEngine.random_ltd_initialize",
        "deepspeed.runtime.engine:DeepSpeedEngine.set_custom_curriculum_learning_schedule",
    ],
    "mixture of quantization and eigenvalues": [
        "deepspeed.runtime.engine:DeepSpeedEngine.quantize_training",
        "deepspeed.runtime.engine:_eigenvalue_summary_events",
    ],
    "offload to CPU and NVMe": [
        "deepspeed.runtime.engine:DeepSpeedEngine.swap_tensor_config",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.complete_grad_norm_calculation_for_cpu_offload",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.get_lean_optimizer_state",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.reset_cpu_buffers",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.reset_swap_buffers",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.complete_grad_norm_calculation_for_cpu_offload",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.copy_grads_in_partition",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.reset_cpu_buffers",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.set_norm_for_param_grad",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.set_norm_for_param_grad_in_gpu",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_offload_overflow_tracker",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_offload_overflow_tracker_for_param_grad",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.set_norm_for_param_grad_in_gpu",
    ],
    "inference": [
        "deepspeed.inference.engine:InferenceEngine.build_alibi_tensor",
        "deepspeed.inference.engine:InferenceEngine.build_attn_bias",
        "deepspeed.inference.engine:InferenceEngine.load_model_with_checkpoint",
        "deepspeed.inference.engine:InferenceEngine.remove_mask_prepare_for_bloom",
    ],
    "ZeRO++": [
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.invalidate_secondary_tensor",
    ],
}

# Steps of another implementation that no known client calls (engine-members of the contract lists none of them), and
# what stands in their place -> their names.
INNER = {
    "validators of pydantic models; csrc/config judges the configuration": [
        "deepspeed.runtime.zero.config:DeepSpeedZeroConfig.elastic_checkpoint_deprecated",
        "deepspeed.runtime.zero.config:DeepSpeedZeroConfig.offload_ratio_check",
        "deepspeed.runtime.zero.config:DeepSpeedZeroConfig.overlap_comm_valid",
        "deepspeed.runtime.zero.config:DeepSpeedZeroOffloadOptimizerConfig.set_pipeline",
        "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig.set_pipeline",
    ],
    "clipping and unscaling are part of the fused step": [
        "deepspeed.runtime.engine:DeepSpeedEngine.clip_fp32_gradients",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_grad_norm_direct",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.unscale_and_clip_grads",
    ],
    "bookkeeping of backward passes; csrc/zero/engine.cpp does it in C++": [
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.clear_backward_seen_flag",
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.enter_backward",
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.exit_backward",
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.queue_post_backward_callback",
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.reenter_backward_if_needed",
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.register_grad_acc_post_hook",
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.report_ipg_memory_usage",
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.run_grad_acc_post_hooks",
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.should_refresh_expected_hook_count",
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.unregister_grad_acc_post_hooks",
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.update_hook_state_and_maybe_run_epilogue",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.clear_backward_seen_flag",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.clear_backward_seen_flag",
    ],
    "which columns are updated when; csrc/zero/step/strategies/zenflow.cpp does it in C++, and no hooks are needed": [
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.create_zenflow_hooks",
    ],
    "a key of host copies in optimizer states; ours lie beside the states, not among them": [
        "deepspeed.runtime.zero.offload_states:_make_offload_state_key",
    ],
    "steps of the reduction; csrc/zero/gradients/grad_reducer.cpp does it in C++, engine.allreduce_* serve scripts": [
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.allreduce_and_copy",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.allreduce_bucket",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.allreduce_no_retain",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.dump_post_step_gradients",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.dump_pre_step_gradients",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.finalize_gradient_accumulation_boundary",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.get_grads_to_reduce",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.initialize_gradient_partitioning_data_structures",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.partition_grads",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.reduce_independent_p_g_buckets_and_remove_grads",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.reduce_ready_partitions_and_remove_grads",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.set_grad_positions",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.set_none_gradients_to_zero",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.zero_reduced_gradients",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.allreduce_and_copy",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.allreduce_and_copy_with_multiple_ranks",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.allreduce_and_scatter",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.allreduce_bucket",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.allreduce_no_retain",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.average_tensor",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.buffered_reduce_fallback",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.clear_grad_attribute",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.create_gradient_handling_hooks",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.fill_grad_accum_attribute",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.finalize_gradient_accumulation_boundary",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_all_grad_tensors",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_grad_position",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_gradient_for_reduction",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_grads_to_reduce",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_param_gradient_attribute",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.gradient_reduction_w_predivide",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.initialize_gradient_partition",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.initialize_gradient_partitioning_data_structures",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.process_gradients",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.reduce_ready_partitions_and_remove_grads",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.reset_partition_gradient_structures",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.set_none_gradients_to_zero",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.setup_buckets",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.zero_reduced_gradients",
    ],
    "the layout of flat buffers; csrc/plan/shard_map.h lays ours out": [
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.flatten_and_print",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.flatten_dense_tensors_aligned",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.get_data_parallel_partitions",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.get_first_param_index",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.get_flat_partition",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.get_groups_without_padding",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.get_partition_info",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.has_overflow_serial",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.initialize_ds_offload",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.flatten_and_print",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_data_parallel_partitions",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_first_param_index",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_flat_partition",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_partition_info",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.has_overflow_serial",
    ],
}
