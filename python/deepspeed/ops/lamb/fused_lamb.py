"""FusedLamb: LAMB with two kernel calls for all tensors of a parameter group, on the device they are on.

The update is that of You et al. 2020, "Large Batch Optimization for Deep Learning", with bias correction in the rate
instead of the direction; the exact order of operations is in ``csrc/kernels/lamb.h``.
"""

import math

import torch

from deepspeed.ops.native_optimizer import NativeOptimizer, adam_defaults, loss_of


class FusedLamb(NativeOptimizer):
    """LAMB: Adam's direction with decoupled decay, scaled for each parameter by a trust ratio.

    With ``u = m / (sqrt(v) + eps) + weight_decay * p`` of the raw moments, a parameter moves by
    ``-rate * clamp(|p| / |u|, min_coeff, max_coeff) * u``, where ``rate`` is ``lr`` times the bias correction of update
    number t, ``sqrt(1 - beta2**t) / (1 - beta1**t)``; the ratio is 1 where one of the norms is zero. Works on CUDA and
    on CPU tensors, and inside ZeRO at every stage: the norms are those of whole parameters, wherever their parts are.

    Args:
        params: iterable of parameters (fp32, bf16 or fp16) or of parameter groups.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        bias_correction: correct the rate for moments that started at zero; False: ``rate`` is ``lr``.
        eps_inside_sqrt: ``sqrt(v + eps)`` instead of ``sqrt(v) + eps``.
        max_grad_norm: above 0, gradients are scaled down so that the 2-norm over a parameter group is at most this.
            Inside an engine it must be 0: the key ``gradient_clipping`` does that.
        max_coeff, min_coeff: bounds of the ratio.
        amsgrad: not implemented, must be False.

    Raises:
        ValueError: a hyperparameter is out of range.
        RuntimeError: ``amsgrad=True``, a sparse gradient, or CUDA parameters where no CUDA kernels were built.
    """

    rule = "lamb"

    def __init__(self, params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, eps_inside_sqrt=False,
                 weight_decay=0.0, max_grad_norm=0.0, max_coeff=10.0, min_coeff=0.01, amsgrad=False):  # fmt: skip
        if amsgrad:
            raise RuntimeError("FusedLamb does not implement AMSGrad: pass amsgrad=False.")
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(
                f"FusedLamb: the trust ratio's bounds must be 0 <= min_coeff <= max_coeff, got min_coeff={min_coeff} "
                f"and max_coeff={max_coeff}."
            )
        defaults = {**adam_defaults(lr, bias_correction, betas, eps, weight_decay), "max_grad_norm": max_grad_norm}
        self.eps_inside_sqrt = bool(eps_inside_sqrt)
        self.max_coeff, self.min_coeff = float(max_coeff), float(min_coeff)
        self._sums = []  # of the last step: (parameters, their sums of squares), one for each native call
        self._given = None
        super().__init__(
            params, defaults, eps_inside_sqrt=eps_inside_sqrt, max_coeff=self.max_coeff, min_coeff=self.min_coeff
        )

    def _check_group(self, group):
        super()._check_group(group)
        if not group["max_grad_norm"] >= 0:
            raise ValueError(f"FusedLamb: max_grad_norm must be at least 0, got {group['max_grad_norm']}.")

    def __getstate__(self):
        state = super().__getstate__()
        state["_sums"] = []
        return state

    def check_engine(self):
        """Raise where an engine cannot run this optimizer."""
        norms = [group["max_grad_norm"] for group in self.param_groups]
        if any(norm > 0 for norm in norms):
            raise ValueError(
                f"FusedLamb has max_grad_norm={max(norms)}, but inside an engine gradients are clipped by the engine. "
                'Set the key "gradient_clipping" of the config, and leave max_grad_norm at 0.'
            )

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=1.0, grad_norms=None):
        """One update of every parameter that has a gradient.

        The last four are for callers that keep fp32 masters by themselves, outside an engine.

        Args:
            closure: recomputes the loss; it runs with gradients enabled.
            grads: gradients to use instead of ``p.grad``: a list of tensors for the only group, or a list of such
                lists.
            output_params: tensors in the same arrangement that get a copy of the updated parameters.
            scale: what the gradients are divided by.
            grad_norms: the 2-norm of each group's (scaled) gradients, for ``max_grad_norm``; computed where None.

        Returns:
            what ``closure`` returns, or None.
        """
        loss = loss_of(closure)
        if self.fused_state is not None:
            if grads is not None or output_params is not None or scale != 1.0 or grad_norms is not None:
                raise RuntimeError(
                    "FusedLamb belongs to an engine, which has the gradients: step takes no grads, output_params, "
                    "scale or grad_norms there."
                )
            self.fused_state.step()
            return loss
        self._sums = []
        grads, outputs = self._by_group(grads, "grads"), self._by_group(output_params, "output_params")
        norms = [None] * len(self.param_groups) if grad_norms is None else list(grad_norms)
        for group, own, out, norm in zip(self.param_groups, grads, outputs, norms):
            self._given = self._scaled(group, own, float(scale), norm)
            try:
                self._step_group(group)
            finally:
                self._given = None
            for param, target in zip(group["params"], out or []):
                target.copy_(param)
        return loss

    def _by_group(self, given, what):
        if given is None:
            return [None] * len(self.param_groups)
        given = list(given)
        lists = given if given and isinstance(given[0], (list, tuple)) else [given]
        if [len(tensors) for tensors in lists] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                f"FusedLamb.step: {what} must have one tensor for each parameter, in a list for each parameter group; "
                f"got {[len(tensors) for tensors in lists]} for groups of "
                f"{[len(group['params']) for group in self.param_groups]}."
            )
        return lists

    def _scaled(self, group, grads, scale, norm):
        """param -> gradient, where they are not simply ``p.grad``; else None."""
        limit = group["max_grad_norm"]
        if grads is None and scale == 1.0 and limit == 0:
            return None
        if grads is None:
            grads = [param.grad for param in group["params"]]
        given = {param: grad for param, grad in zip(group["params"], grads) if grad is not None}
        factor = 1.0 / scale
        if limit > 0 and given:
            if norm is None:
                norms = [grad.double().norm() for grad in given.values()]
                norm = torch.stack([one.to(norms[0].device) for one in norms]).norm()
            clip = limit / (torch.as_tensor(norm, dtype=torch.float64) * factor + 1e-6)
            factor = factor * clip.clamp(max=1.0)
        if isinstance(factor, float) and factor == 1.0:
            return given
        return {param: grad.float() * torch.as_tensor(factor).to(grad.device) for param, grad in given.items()}

    def _gradient(self, param):
        return param.grad if self._given is None else self._given.get(param)

    def _update(self, rule, args, device, step, params, grads, states):
        super()._update(rule, args, device, step, params, grads, states)
        if self.fused_state is None:
            self._sums.append((params, self._runner(rule).sums()))

    def get_lamb_coeffs(self):
        """The trust ratios of the last step: one float for each parameter, group by group; 1.0 where it had none.

        Waits for the device.
        """
        if self.fused_state is not None:
            sums = self.fused_state.core.sums()
            rows = [] if sums is None else sums.tolist()
        else:
            found = {param: row for params, sums in self._sums for param, row in zip(params, sums.tolist())}
            params = [param for group in self.param_groups for param in group["params"]]
            rows = [found.get(param, (0.0, 0.0)) for param in params]
        return [self._ratio(*row) for row in rows]

    def _ratio(self, weight, update):
        if weight == 0 or update == 0:
            return 1.0
        if math.isnan(weight) or math.isnan(update):
            return math.nan
        return min(max(math.sqrt(weight) / math.sqrt(update), self.min_coeff), self.max_coeff)
