"""bf16 weights, fp32 gradients and masters, states on shares: ``BF16_Optimizer``.

It is ZeRO stage 1 with gradients accumulated in fp32, and saves the same files. ``deepspeed.initialize`` makes one for
bf16 at stage 1 with ``data_types.grad_accum_dtype`` "fp32". Made by hand it works with any training loop: gradients
that plain backwards leave in ``param.grad`` are added to the fp32 ones by ``update_hp_grads``, or by ``step`` itself.
"""

import torch

from deepspeed.published.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.zero.optimizers.high_precision_grads import HighPrecisionGrads


class BF16_Optimizer(HighPrecisionGrads, DeepSpeedZeroOptimizer):
    """Wraps ``init_optimizer``, whose parameters are those of a bf16 model ("lp"); fp32 masters and gradients are "hp".

    Arguments as in the contract: ``param_names`` is a dict from parameter to name, ``bfloat16_config`` the section
    ``bf16`` of the configuration, ``clip_grad`` the largest 2-norm of all gradients (0: no limit), ``grad_acc_dtype``
    the dtype of hp gradients. ``norm_type`` other than 2 is refused with NotImplementedError. ``graph_harvesting``
    changes nothing: a step has a few launches for each bucket. ``has_moe_layers`` says nothing new: parameters of
    experts are known by themselves.
    """

    def __init__(
        self,
        init_optimizer,
        param_names,
        bfloat16_config,
        mpu=None,
        clip_grad=0.0,
        norm_type=2,
        allgather_bucket_size=5000000000,
        dp_process_group=None,
        timers=None,
        grad_acc_dtype=None,
        graph_harvesting=False,
        has_moe_layers=False,
        engine=None,
    ):
        if norm_type != 2:
            raise NotImplementedError(f"BF16_Optimizer: norm_type {norm_type} is not supported; gradients have 2-norms")
        for position, group in enumerate(init_optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if param.dtype == torch.float16:
                    raise ValueError(
                        f"BF16_Optimizer: parameter {index} of group {position}, {tuple(param.shape)}, is fp16; call "
                        "model.bfloat16() first, or use fp16 in the configuration"
                    )
        self.bfloat16_config = bfloat16_config
        self.norm_type = norm_type
        super().__init__(
            init_optimizer,
            param_names,
            timers,
            {},
            allgather_bucket_size=allgather_bucket_size,
            dp_process_group=dp_process_group,
            mpu=mpu,
            clip_grad=clip_grad,
            gradient_accumulation_dtype=torch.float32 if grad_acc_dtype is None else grad_acc_dtype,
            partition_grads=False,
            has_moe_layers=has_moe_layers,
            engine=engine,
        )
        if engine is None and bfloat16_config is not None:
            self.stepping.check = bool(bfloat16_config.check_grad_overflow)
        if getattr(bfloat16_config, "immediate_grad_update", False):
            self.create_grad_acc_hooks()

    def load_state_dict(
        self,
        state_dict_list,
        checkpoint_folder=None,
        load_optimizer_states=True,
        load_from_fp32_weights=False,
        load_serial=None,
        param_shapes=None,
    ):
        """``state_dict_list`` holds the shards of all ranks that saved, in rank order."""
        super().load_state_dict(
            state_dict_list,
            load_optimizer_states=load_optimizer_states,
            load_from_fp32_weights=load_from_fp32_weights,
            checkpoint_folder=checkpoint_folder,
            load_serial=load_serial,
            param_shapes=param_shapes,
        )
