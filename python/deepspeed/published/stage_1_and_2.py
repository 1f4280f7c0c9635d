"""The published class of ZeRO stages 1 and 2. Its arguments are those of the contract; where an engine makes it, the
configuration decides instead of most of them. Made by hand it has a core of its own, configured by its arguments."""

import functools

import torch

from deepspeed.checkpoint.layouts.saved_shards import FlatState, in_memory
from deepspeed.zero.core import core_config, section_values
from deepspeed.zero.optimizers.flat_optimizer import FlatOptimizer


class DeepSpeedZeroOptimizer(FlatOptimizer):
    """Stage 2 with ``partition_grads``, else stage 1. ``engine``: of ``deepspeed.initialize``, which passes itself."""

    saved_form = staticmethod(functools.partial(in_memory, FlatState))

    def __init__(
        self,
        init_optimizer,
        param_names,
        timers,
        optimizer_params,
        static_loss_scale=1.0,
        dynamic_loss_scale=False,
        dynamic_loss_args=None,
        verbose=True,
        contiguous_gradients=True,
        reduce_bucket_size=500000000,
        use_multi_rank_bucket_allreduce=True,
        allgather_bucket_size=5000000000,
        dp_process_group=None,
        expert_parallel_group=None,
        expert_data_parallel_group=None,
        reduce_scatter=True,
        overlap_comm=False,
        offload_optimizer_config=None,
        zenflow_config=None,
        mpu=None,
        clip_grad=0.0,
        gradient_accumulation_dtype=torch.float32,
        communication_data_type=torch.float16,
        postscale_gradients=True,
        gradient_predivide_factor=1.0,
        gradient_average=True,
        gradient_accumulation_steps=1,
        ignore_unused_parameters=True,
        partition_grads=True,
        round_robin_gradients=False,
        has_moe_layers=False,
        fp16_master_weights_and_gradients=False,
        bf16_master_weights_and_gradients=False,
        bf16_optimizer_states=False,
        elastic_checkpoint=False,
        check_grad_overflow=True,
        engine=None,
    ):
        config = core_config(
            {
                "zero_optimization": {
                    "stage": 2 if partition_grads else 1,
                    "reduce_bucket_size": reduce_bucket_size,
                    "allgather_bucket_size": allgather_bucket_size,
                    "overlap_comm": bool(overlap_comm),
                    "reduce_scatter": bool(reduce_scatter),
                    "offload_optimizer": section_values(offload_optimizer_config),
                },
                "prescale_gradients": True,  # by 1: gradients are divided after their sum
            }
        )
        super().__init__(
            init_optimizer,
            engine,
            param_names,
            (static_loss_scale, dynamic_loss_scale, dynamic_loss_args),
            clip_grad,
            partition_grads=partition_grads,
            elastic_checkpoint=elastic_checkpoint,
            dp_process_group=dp_process_group,
            grad_dtype=gradient_accumulation_dtype,
            config=None if engine is not None else config,
        )
