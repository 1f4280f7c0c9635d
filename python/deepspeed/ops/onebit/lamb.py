"""OnebitLamb: LAMB until the variance is frozen, then momentum that travels as signs (arXiv 2104.06069)."""

from deepspeed.ops.onebit.sign_optimizer import SignOptimizer, freeze_args, onebit_defaults


class OnebitLamb(SignOptimizer):
    """1-bit LAMB. The first ``freeze_step`` updates are LAMB's, and the ratio of each parameter is averaged. Later the
    ratio is this average times a factor. The factor comes from a fresh variance, which is rebuilt from the momentum
    that the ranks have exchanged.

    Args:
        params: iterable of parameters or of parameter groups.
        deepspeed: the engine, for published scripts.
        lr, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff: as in ``FusedLamb``.
        freeze_step: number of updates until the variance is frozen, 15 to 25 % of all as a rule. "auto": until
            its norm has changed by less than 4 % over 1 / (1 - beta2) updates.
        bias_correction: the published class ignores it, so it is off by default; with True the rate is corrected.
        coeff_beta: decay of the average of the ratio.
        factor_max, factor_min: bounds of the factor.
        factor_threshold: relative change of the factor from one step to the next, at most.
        amsgrad, max_grad_norm: must have their defaults.
        cuda_aware, comm_backend_name: transport of the signs, see ``SignOptimizer``.
    """

    rule = "onebit_lamb"
    one_scale = True  # parameters of a bucket are sent with one scale, so copies elsewhere would become others

    def __init__(self, params, deepspeed=None, lr=1e-3, freeze_step=100000, bias_correction=False, betas=(0.9, 0.999),
                 eps=1e-8, eps_inside_sqrt=False, weight_decay=0.0, max_grad_norm=0.0, max_coeff=10.0, min_coeff=0.01,
                 amsgrad=False, cuda_aware=False, comm_backend_name="nccl", coeff_beta=0.9, factor_max=4.0,
                 factor_min=0.5, factor_threshold=0.1):  # fmt: skip
        name, self.freeze_step = type(self).__name__, freeze_step
        if not (0 <= min_coeff <= max_coeff and 0 < factor_min <= factor_max):
            raise ValueError(
                f"{name}: bounds must be 0 <= min_coeff <= max_coeff and 0 < factor_min <= factor_max, got {min_coeff} "
                f"and {max_coeff}, {factor_min} and {factor_max}."
            )
        defaults = onebit_defaults(name, lr, bias_correction, betas, eps, weight_decay, max_grad_norm, amsgrad)
        self.max_coeff, self.min_coeff = float(max_coeff), float(min_coeff)
        super().__init__(
            params, defaults, deepspeed, cuda_aware, comm_backend_name, eps_inside_sqrt=eps_inside_sqrt,
            max_coeff=self.max_coeff, min_coeff=self.min_coeff, coeff_beta=coeff_beta, factor_max=factor_max,
            factor_min=factor_min, factor_threshold=factor_threshold,
        )  # fmt: skip

    def rule_args(self, group):
        return {**super().rule_args(group), **freeze_args(self)}

    @property
    def lamb_freeze_key(self):
        """Whether the variance is frozen, so that the next step exchanges signs."""
        return self._frozen

    def get_lamb_coeffs(self):
        """The ratios of the last step: one float for each parameter, group by group; 1.0 where it had none. Waits for
        the device."""
        sums = None if self.fused_state is None else self.fused_state.core.sums()
        ratios = [] if sums is None else sums[:, 2].tolist()
        return [ratio if ratio != 0 else 1.0 for ratio in ratios]
