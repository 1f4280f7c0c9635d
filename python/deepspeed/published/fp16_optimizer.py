"""The published classes of 16-bit weights with fp32 masters. Arguments that old callers pass and that change
nothing here are accepted."""

import torch

from deepspeed.checkpoint.layouts.saved_shards import PlainState
from deepspeed.optim.loss_scaler import LossScaleConfig
from deepspeed.zero.optimizers.master_optimizer import MasterOptimizer, UnfusedMasterOptimizer


class FP16_Optimizer(MasterOptimizer):
    """Wraps ``init_optimizer``, whose parameter groups keep their identity: schedulers made for them stay valid.

    ``deepspeed`` is the engine that owns the core; without one the optimizer makes a core of its own for one process.
    ``loss_scale_config`` is a ``LossScaleConfig``; without one it is made from ``static_loss_scale``,
    ``dynamic_loss_scale``, ``initial_dynamic_scale`` and ``dynamic_loss_args``. ``clip_grad`` is the maximum 2-norm of
    the gradients, 0 for none. The other arguments exist for old callers and change nothing.
    """

    saved_form = PlainState

    def __init__(
        self,
        init_optimizer,
        deepspeed=None,
        loss_scale_config=None,
        low_precision_dtype=torch.float16,
        static_loss_scale=1.0,
        dynamic_loss_scale=False,
        initial_dynamic_scale=2**32,
        dynamic_loss_args=None,
        verbose=True,
        mpu=None,
        clip_grad=0.0,
        fused_adam_legacy=False,
        has_moe_layers=False,
        timers=None,
    ):
        if loss_scale_config is None:
            if dynamic_loss_scale and dynamic_loss_args is None:
                dynamic_loss_args = {"init_scale": initial_dynamic_scale}
            loss_scale_config = LossScaleConfig(
                low_precision_dtype, dynamic_loss_scale, static_loss_scale, dynamic_loss_args
            )
        super().__init__(init_optimizer, deepspeed, loss_scale_config, low_precision_dtype, clip_grad)


class FP16_UnfusedOptimizer(UnfusedMasterOptimizer, FP16_Optimizer):
    """The same for optimizers other than ``FusedAdam``: their state is kept parameter by parameter, as they made it."""

    def __init__(
        self,
        init_optimizer,
        deepspeed=None,
        loss_scale_config=None,
        low_precision_dtype=torch.float16,
        static_loss_scale=1.0,
        dynamic_loss_scale=False,
        dynamic_loss_args=None,
        verbose=True,
        mpu=None,
        clip_grad=0.0,
        fused_lamb_legacy=False,
    ):
        super().__init__(
            init_optimizer,
            deepspeed,
            loss_scale_config,
            low_precision_dtype,
            static_loss_scale,
            dynamic_loss_scale,
            dynamic_loss_args=dynamic_loss_args,
            clip_grad=clip_grad,
        )
