"""ZeroOneAdam: Adam whose ranks become equal at growing intervals, by signs (arXiv 2202.06009)."""

from deepspeed.ops.onebit.sign_optimizer import SignOptimizer, onebit_defaults, refuse_eps_inside


class ZeroOneAdam(SignOptimizer):
    """0/1 Adam. Up to ``var_freeze_step``, gradients of some steps are added up in full and update both averages;
    those of the other steps travel as signs and update the momentum. Later the variance stays as it is, and each rank
    makes local steps, until the ranks exchange the signs of what they have changed.

    Args:
        params: iterable of parameters or of parameter groups.
        deepspeed: the engine, for published scripts.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        bias_correction: the published class ignores it, so it is off by default; with True the averages are corrected.
        var_freeze_step: number of updates until the variance is frozen.
        var_update_scaler: after this many updates of the variance their interval doubles.
        local_step_scaler: after this many local steps the interval of the exchanges doubles.
        local_step_clipper: the longest interval of the exchanges, in steps.
        eps_inside_sqrt, amsgrad, max_grad_norm: must have their defaults.
        cuda_aware, comm_backend_name: transport of the signs, see ``SignOptimizer``.
    """

    rule = "zero_one_adam"

    def __init__(self, params, deepspeed=None, lr=1e-3, bias_correction=False, betas=(0.9, 0.999), eps=1e-8,
                 eps_inside_sqrt=False, weight_decay=0.0, max_grad_norm=0.0, var_freeze_step=100000,
                 var_update_scaler=16, local_step_scaler=32678, local_step_clipper=16, amsgrad=False, cuda_aware=False,
                 comm_backend_name="nccl"):  # fmt: skip
        refuse_eps_inside(type(self).__name__, eps_inside_sqrt)
        name, self.var_freeze_step = type(self).__name__, var_freeze_step
        for key, value in (("var_update_scaler", var_update_scaler), ("local_step_scaler", local_step_scaler),
                           ("local_step_clipper", local_step_clipper)):  # fmt: skip
            if value < 1:
                raise ValueError(f"{name}: {key} must be at least 1, got {value}.")
            setattr(self, key, int(value))
        defaults = onebit_defaults(name, lr, bias_correction, betas, eps, weight_decay, max_grad_norm, amsgrad)
        super().__init__(params, defaults, deepspeed, cuda_aware, comm_backend_name)

    def rule_args(self, group):
        names = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
        return {**super().rule_args(group), **{name: float(getattr(self, name)) for name in names}}

    def plain_steps(self):
        return min(self.var_freeze_step, self.var_update_scaler)

    @property
    def var_freeze_key(self):
        """Whether the variance is frozen, so that the next step is a local one."""
        return self._frozen
