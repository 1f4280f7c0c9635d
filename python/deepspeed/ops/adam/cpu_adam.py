"""DeepSpeedCPUAdam: Adam and AdamW for parameters in host memory."""

import torch

from deepspeed.ops.adam.rollback import before_update
from deepspeed.ops.cpu_optimizer import CPUOptimizer
from deepspeed.ops.native_optimizer import adam_defaults, loss_of


class DeepSpeedCPUAdam(CPUOptimizer):
    """Adam (``adamw_mode=False``) or AdamW for parameters in host memory, for offloaded optimizer states.

    Each step is one native call per parameter group, on ``torch.get_num_threads()`` threads.

    Args:
        model_params: iterable of parameters (fp32, bf16 or fp16) or of parameter groups.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        bias_correction: divide the moments by ``1 - beta ** step``.
        amsgrad: not implemented, must be False.
        adamw_mode: decoupled weight decay; False adds ``weight_decay * p`` to the gradient.
        fp32_optimizer_states: keep the moments of 16-bit parameters in fp32; False keeps them in the parameter's dtype.

    Raises:
        ValueError: a hyperparameter is out of range.
        RuntimeError: ``amsgrad=True``, or a sparse gradient.
        AssertionError: at a step, where a parameter is not in host memory.
    """

    rule = "adam"
    optimizer_id = 0  # of the next object; an object's own is opt_id

    def __init__(self, model_params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, weight_decay=0,
                 amsgrad=False, adamw_mode=True, fp32_optimizer_states=True):  # fmt: skip
        defaults = {**adam_defaults(lr, bias_correction, betas, eps, weight_decay), "amsgrad": amsgrad}
        super().__init__(model_params, defaults, fp32_optimizer_states, decoupled=bool(adamw_mode))
        self.adam_w_mode = adamw_mode

    def _group(self, index):
        if not 0 <= index < len(self.param_groups):
            raise IndexError(f"there is no parameter group {index}: the optimizer has {len(self.param_groups)}.")
        return self.param_groups[index]

    @torch.no_grad()
    def step_subgroup(self, subgroup_id, closure=None):
        """Like ``step``, for ``param_groups[subgroup_id]`` alone.

        Raises:
            IndexError: no such group.
        """
        group = self._group(subgroup_id)
        loss = loss_of(closure)
        self._step_group(group)
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id, closure=None):
        """Undo the last update of ``param_groups[sub_group_id]``.

        The update is inverted, in fp64, from the parameters, the moments and the gradients, which must still be those
        of the update; nothing has to be kept for it. The result equals the values before the update but for their
        last digits. Hyperparameters must not have changed in between.

        Raises:
            IndexError: no such group.
            RuntimeError: a parameter of the group has not been updated yet, or cannot be restored because its
                gradient was not finite; nothing is changed then.
        """
        group = self._group(sub_group_id)
        loss = loss_of(closure)
        stepped = [(index, param) for index, param in enumerate(group["params"]) if param.grad is not None]
        restored = [self._before_update(index, param, group) for index, param in stepped]
        for param, old_param, old_exp_avg, old_exp_avg_sq in restored:
            state = self.state[param]
            state["step"] = int(state["step"]) - 1
            param.copy_(old_param)
            state["exp_avg"].copy_(old_exp_avg)
            state["exp_avg_sq"].copy_(old_exp_avg_sq)
        return loss

    def _before_update(self, index, param, group):
        """(param, its values, exp_avg and exp_avg_sq before the last update, in fp64)."""
        state = self.state[param]
        step = int(state.get("step", 0))
        if step == 0:
            raise RuntimeError(f"parameter {index} of the group has not been updated: there is nothing to roll back.")
        old = before_update(
            param, param.grad, state["exp_avg"], state["exp_avg_sq"], step=step, **self.rule_args(group)
        )
        if old is None:
            raise RuntimeError(
                f"parameter {index} of the group cannot be rolled back: its gradient or its update was not finite. "
                f"Check gradients before step_subgroup, and restore the parameter from a checkpoint."
            )
        return param, *old
