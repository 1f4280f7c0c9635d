"""FusedSGD: SGD with momentum with one kernel call for all tensors of a parameter group, on any device."""

from deepspeed.ops.fused_optimizer import FusedOptimizer


class FusedSGD(FusedOptimizer):
    """SGD with momentum (Sutskever et al. 2013); the formula is in ``csrc/kernels/sgd.h``.

    Args:
        params: iterable of parameters (fp32, bf16 or fp16) or of parameter groups.
        lr, momentum, dampening, weight_decay, nesterov: as in torch.optim.SGD. The buffer is there
            without momentum, too.
        set_grad_none: ``zero_grad`` drops gradients instead of filling them with zeros.

    Raises:
        ValueError: a hyperparameter is out of range; ``nesterov`` without momentum or with dampening.
        RuntimeError: a sparse gradient, or CUDA parameters where no CUDA kernels were built.
    """

    rule = "sgd"

    def __init__(
        self, params, lr=0.001, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, set_grad_none=True
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none)

    def _check_group(self, group):
        super()._check_group(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"FusedSGD: nesterov needs a momentum above 0 and no dampening, got momentum {group['momentum']} and "
                f"dampening {group['dampening']}."
            )
