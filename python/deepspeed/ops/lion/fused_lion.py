"""FusedLion: Lion with one kernel call for all tensors of a parameter group, on the device they are on."""

from deepspeed.ops.fused_optimizer import FusedOptimizer


class FusedLion(FusedOptimizer):
    """Lion (Chen et al. 2023) on the CPU or a GPU. Arguments and errors are those of ``DeepSpeedCPULion``; the momentum
    is fp32, ``set_grad_none`` as in ``FusedAdam``."""

    rule = "lion"

    def __init__(self, params, lr=0.001, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), set_grad_none)
