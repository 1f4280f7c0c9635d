"""The published classes of ZeRO stage 3. Their arguments are those of the contract; instead of most of them the
configuration decides, from which the engine that makes these objects has built the native core."""

import functools
import sys

import torch

from deepspeed.checkpoint.layouts.saved_shards import SlicedState, in_memory, own_shard
from deepspeed.zero.gathers.model_gathering import ModelGathering
from deepspeed.zero.optimizers.sliced_optimizer import SlicedOptimizer


class DeepSpeedZeRoOffload(ModelGathering):
    """Gathers a sharded model's parameters while its modules run. ``engine.optimizer`` itself without an optimizer.

    ``core`` is the native engine that holds the shards.
    """

    def __init__(
        self,
        module,
        timers,
        ds_config,
        zenflow=False,
        overlap_comm=True,
        prefetch_bucket_size=50000000,
        max_reuse_distance=1000000000,
        max_live_parameters=1000000000,
        param_persistence_threshold=100000,
        model_persistence_threshold=sys.maxsize,
        dp_process_group=None,
        offload_param_config=None,
        mpu=None,
        zero_param_parallel_group=None,
        zero_quantized_weights=False,
        zero_quantized_nontrainable_weights=False,
        zero_module_granularity_threshold=0,
        log_trace_cache_warnings=False,
        core=None,
        mem_efficient_linear=True,
    ):
        super().__init__(
            module, core, dp_process_group, zero_module_granularity_threshold, mem_efficient_linear=mem_efficient_linear
        )


class DeepSpeedZeroOptimizer_Stage3(SlicedOptimizer):
    """Parameters, gradients and states are slices; modules gather what they need while they run."""

    saved_form, own_slices = staticmethod(functools.partial(in_memory, SlicedState)), staticmethod(own_shard)

    def __init__(
        self,
        module,
        init_optimizer,
        param_names,
        timers,
        ds_config,
        static_loss_scale=1.0,
        dynamic_loss_scale=False,
        dynamic_loss_args=None,
        verbose=True,
        contiguous_gradients=True,
        reduce_bucket_size=500000000,
        prefetch_bucket_size=50000000,
        max_reuse_distance=1000000000,
        max_live_parameters=1000000000,
        param_persistence_threshold=100000,
        model_persistence_threshold=sys.maxsize,
        dp_process_group=None,
        reduce_scatter=True,
        overlap_comm=False,
        offload_optimizer_config=None,
        offload_param_config=None,
        zenflow_config=None,
        sub_group_size=1000000000000,
        offload_ratio=0.0,
        mpu=None,
        clip_grad=0.0,
        gradient_accumulation_dtype=torch.float32,
        communication_data_type=torch.float16,
        fp16_master_weights_and_gradients=False,
        bf16_master_weights_and_gradients=False,
        bf16_optimizer_states=False,
        postscale_gradients=True,
        gradient_predivide_factor=1.0,
        gradient_accumulation_steps=1,
        elastic_checkpoint=False,
        aio_config=None,
        all2all_process_group=None,
        zero_hpz_partition_size=1,
        zero_quantized_weights=False,
        zero_quantized_nontrainable_weights=False,
        zero_module_granularity_threshold=0,
        zeropp_loco_param=None,
        log_trace_cache_warnings=False,
        enable_sanity_checks=False,
        cpuadam_cores_perc=0.8,
        save_muon_momentum_buffer_in_memory=False,
        engine=None,
        mem_efficient_linear=True,
    ):
        if engine is None:
            raise ValueError("DeepSpeedZeroOptimizer_Stage3 is made by deepspeed.initialize with ZeRO stage 3")

        def gathering(core):
            return DeepSpeedZeRoOffload(
                module,
                timers,
                ds_config,
                dp_process_group=dp_process_group,
                zero_module_granularity_threshold=zero_module_granularity_threshold,
                core=core,
                mem_efficient_linear=mem_efficient_linear,
            )

        super().__init__(
            module,
            init_optimizer,
            engine,
            param_names,
            (static_loss_scale, dynamic_loss_scale, dynamic_loss_args),
            clip_grad,
            sub_group_size=sub_group_size,
            gathering=gathering,
            dp_process_group=dp_process_group,
        )
