"""AdamW for some columns of each matrix: what ZenFlow updates at once, as optimizers of torch for loops of your own.

The engine does this in C++ (``zero_optimization.zenflow``) and needs no such object.
"""

import torch

from deepspeed.ops.native_optimizer import loss_of
from deepspeed.utils.runs import runs_of


class _SelectiveAdamW(torch.optim.AdamW):
    """A matrix names its columns in ``param.selected_indices`` and has their gradient, ``[rows, columns]``, in
    ``param.selected_grad``; a vector, or a parameter without ``selected_indices``, has the whole gradient there. One
    without ``selected_grad`` is left alone. An update takes the gradients: they are None afterwards.

    Moments (``exp_avg``, ``exp_avg_sq``, of the columns) belong to a choice of columns: call ``clear_selected_mv()``
    when it changes. ``offload``: between steps they are in host memory; they come and go for parameters of at most
    ``bucket_size`` chosen elements at a time.
    """

    def __init__(self, *args, offload=False, bucket_size=500000000.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.offload, self.bucket_size = bool(offload), bucket_size

    @torch.no_grad()
    def step(self, closure=None):
        """Updates the chosen columns of all parameters."""
        loss = loss_of(closure)
        for group in self.param_groups:
            self._step_params(group, group["params"])
        return loss

    def clear_selected_mv(self):
        """Forgets the moments: the next step begins anew, as for columns that were just chosen."""
        for group in self.param_groups:
            for param in group["params"]:
                for name in ("step", "exp_avg", "exp_avg_sq"):
                    self.state.get(param, {}).pop(name, None)

    def copy_mv_from_cpu(self, params):
        """Moments of these parameters come to where the parameters are."""
        self._move_mv(params, lambda param: param.device)

    def copy_mv_to_cpu(self, params):
        """Moments of these parameters go to host memory."""
        self._move_mv(params, lambda param: torch.device("cpu"))

    def _move_mv(self, params, device_of):
        for param in params:
            state = self.state.get(param, {})
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name] = state[name].to(device_of(param))

    @torch.no_grad()
    def _copy_aside(self, params):
        for param in params:
            if getattr(param, "selected_grad", None) is not None:
                param.temp_selected_param = _chosen(param).clone()

    @torch.no_grad()
    def _step_params(self, group, params):
        taken = [param for param in params if getattr(param, "selected_grad", None) is not None]
        for bucket in runs_of(taken, self.bucket_size, lambda param: param.selected_grad.numel()):
            if self.offload:
                self.copy_mv_from_cpu(bucket)
            for param in bucket:
                self._update(group, param)
            if self.offload:
                self.copy_mv_to_cpu(bucket)

    def _update(self, group, param):
        columns, grad = _chosen(param), param.selected_grad
        if grad.shape != columns.shape:
            raise ValueError(
                f"selected_grad of a parameter of shape {tuple(param.shape)} has shape {tuple(grad.shape)}, the chosen "
                f"columns have {tuple(columns.shape)}: give the gradient of param[:, param.selected_indices]"
            )
        aside = getattr(param, "temp_selected_param", None)
        values = (columns if aside is None else aside).float()
        grad = (-grad if group.get("maximize") else grad).float()
        state, (beta1, beta2) = self.state[param], group["betas"]
        if "exp_avg" not in state:
            state.update(step=0, exp_avg=torch.zeros_like(values), exp_avg_sq=torch.zeros_like(values))
        elif state["exp_avg"].shape != values.shape:
            raise ValueError("other columns are chosen than those of the moments: call clear_selected_mv() first")
        state["step"] += 1
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        rate = float(group["lr"])
        values = values * (1 - rate * group["weight_decay"])
        divisor = (second / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        values.addcdiv_(first, divisor, value=-rate / (1 - beta1 ** state["step"]))
        indices = getattr(param, "selected_indices", None)
        if indices is None:
            param.copy_(values)
        else:
            param[:, indices] = values.to(param.dtype)
        param.selected_grad = param.temp_selected_param = None


def _chosen(param):
    indices = getattr(param, "selected_indices", None)
    return param.detach() if indices is None else param.detach()[:, indices]


class ZenFlowSelectiveAdamW(_SelectiveAdamW):
    """For parameters that each rank has whole, or the part of them that it owns. ``group_to_paramlist``: number of a
    parameter group -> parameters of it."""

    def temp_copy_param(self, group_to_paramlist):
        """Keeps the chosen columns as they are now: the next update starts from them, whatever becomes of the
        parameters meanwhile."""
        for params in group_to_paramlist.values():
            self._copy_aside(params)

    @torch.no_grad()
    def group_step(self, group_to_paramlist):
        """Updates the chosen columns of these parameters."""
        for number, params in group_to_paramlist.items():
            self._step_params(self.param_groups[number], params)


class ZenFlowSelectiveAdamW_stage3(_SelectiveAdamW):
    """The same for lists of parameters of any groups."""

    def temp_copy_param(self, paramlist):
        """Keeps the chosen columns as they are now: the next update starts from them, whatever becomes of the
        parameters meanwhile."""
        self._copy_aside(paramlist)

    @torch.no_grad()
    def group_step(self, paramlist):
        """Updates the chosen columns of these parameters."""
        wanted = {id(param) for param in paramlist}
        for group in self.param_groups:
            self._step_params(group, [param for param in group["params"] if id(param) in wanted])
