"""OnebitAdam: Adam until the variance is frozen, then momentum that travels as signs (arXiv 2102.02888)."""

from deepspeed.ops.onebit.sign_optimizer import SignOptimizer, freeze_args, onebit_defaults, refuse_eps_inside


class OnebitAdam(SignOptimizer):
    """1-bit Adam. The first ``freeze_step`` updates are AdamW's without bias correction, with gradients that all ranks
    have added up. Later the variance stays as it is, each rank updates its momentum with its own gradient, and the
    ranks exchange the signs of the momentum.

    Args:
        params: iterable of parameters or of parameter groups.
        deepspeed: the engine, for published scripts.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        freeze_step: number of updates until the variance is frozen, 15 to 25 % of all as a rule. "auto": until
            its norm has changed by less than 4 % over 1 / (1 - beta2) updates.
        bias_correction: the published class ignores it, so it is off by default; with True the averages are corrected.
        eps_inside_sqrt, amsgrad, max_grad_norm: must have their defaults.
        cuda_aware, comm_backend_name: transport of the signs, see ``SignOptimizer``.
    """

    rule = "onebit_adam"

    def __init__(self, params, deepspeed=None, lr=1e-3, freeze_step=100000, bias_correction=False, betas=(0.9, 0.999),
                 eps=1e-8, eps_inside_sqrt=False, weight_decay=0.0, max_grad_norm=0.0, amsgrad=False, cuda_aware=False,
                 comm_backend_name="nccl"):  # fmt: skip
        refuse_eps_inside(type(self).__name__, eps_inside_sqrt)
        name, self.freeze_step = type(self).__name__, freeze_step
        defaults = onebit_defaults(name, lr, bias_correction, betas, eps, weight_decay, max_grad_norm, amsgrad)
        super().__init__(params, defaults, deepspeed, cuda_aware, comm_backend_name)

    def rule_args(self, group):
        return {**super().rule_args(group), **freeze_args(self)}

    @property
    def adam_freeze_key(self):
        """Whether the variance is frozen, so that the next step exchanges signs."""
        return self._frozen
