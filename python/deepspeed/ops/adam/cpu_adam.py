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

    # ---- subgroups ---------------------------------------------------------------------------------------------------
    # Parts of a flat partition that are updated one after the other: before each call the caller puts one part, with
    # its gradient, into the parameters. Each part has states of its own, ``state[subgroup_id]``.

    def _in_subgroup(self):
        """``[(group, parameters)]`` of those that have a gradient now."""
        if self.fused_state is not None:
            raise RuntimeError(
                "step_subgroup and rollback_subgroup: the parameters of this optimizer are updated by the engine that "
                "it was given to; call engine.step(), or make an optimizer of your own for subgroups"
            )
        pairs = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        return [(group, params) for group, params in pairs if params]

    def _parts(self, subgroup_id, slot, params):
        """The parts of a state of a subgroup that belong to ``params``, each in its shape."""
        whole, numels = self.state[subgroup_id][slot], [param.numel() for param in params]
        if whole.numel() != sum(numels):
            raise ValueError(
                f"subgroup {subgroup_id} has states of {whole.numel()} elements, and the parameters that have a "
                f"gradient now have {sum(numels)}: give every subgroup an id of its own"
            )
        return [part.view(param.shape) for part, param in zip(whole.reshape(-1).split(numels), params)]

    @torch.no_grad()
    def step_subgroup(self, subgroup_id, closure=None):
        """Like ``step``, for the parameters that have a gradient now, which are the subgroup ``subgroup_id``.

        Its states, ``state[subgroup_id]``, are made at its first use, and count its updates: parts of one step that
        have ids of their own all see the same step. States of parameters, which ``step`` makes, stay as they are.

        Raises:
            ValueError: the subgroup had another number of elements before.
            RuntimeError: an engine owns the parameters.
        """
        loss = loss_of(closure)
        groups = self._in_subgroup()
        params = [param for _, of_group in groups for param in of_group]
        if not params:
            return loss
        for param in params:
            self._check_param(param)
        if not self.state.get(subgroup_id):
            dtype, shape = self.state_dtype(params[0]), params[0].shape
            shape = shape if len(params) == 1 else (sum(param.numel() for param in params),)
            slots = {slot: torch.zeros(shape, dtype=dtype) for slot in self.slots_of(groups[0][0])}
            self.state[subgroup_id] = {"step": 0, **slots}
        state, begin = self.state[subgroup_id], 0
        parts = {slot: self._parts(subgroup_id, slot, params) for slot in self.slots_of(groups[0][0])}
        step = int(state["step"]) + 1
        for group, own in groups:
            tensors = [part[begin : begin + len(own)] for part in parts.values()]
            grads = [param.grad for param in own]
            self._update(self.rule_of(group), self.rule_args(group), own[0].device, step, own, grads, tensors)
            begin += len(own)
        state["step"] = step
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id, closure=None):
        """Undo the last update of the subgroup ``sub_group_id``, whose parameters and gradients are in place again.

        The update is inverted, in fp64, from the parameters, the moments and the gradients, which must still be those
        of the update; nothing has to be kept for it. The result equals the values before the update but for their
        last digits. Hyperparameters must not have changed in between.

        Raises:
            RuntimeError: the subgroup has not been updated, or cannot be restored because a gradient was not finite;
                nothing is changed then.
            ValueError: as ``step_subgroup``.
        """
        loss = loss_of(closure)
        state = self.state.get(sub_group_id)
        if not state:
            raise RuntimeError(
                f"Cannot rollback optimizer state for sub_group_id {sub_group_id} as it has not been initialized: call "
                f"step_subgroup({sub_group_id}) first."
            )
        if int(state["step"]) <= 0:
            raise RuntimeError(
                f"Cannot rollback sub_group_id {sub_group_id}: step count is {int(state['step'])}, so there is no "
                "update to undo."
            )
        pairs = [(group, param) for group, own in self._in_subgroup() for param in own]
        if not pairs:
            raise RuntimeError(
                f"Cannot rollback sub_group_id {sub_group_id}: no parameter has a gradient. Put the parameters of the "
                "subgroup and the gradients of its last update in place."
            )
        params = [param for _, param in pairs]
        first, second = (self._parts(sub_group_id, slot, params) for slot in ("exp_avg", "exp_avg_sq"))
        restored = []
        for index, (group, param) in enumerate(pairs):
            args = self.rule_args(group)
            old = before_update(param, param.grad, first[index], second[index], step=int(state["step"]), **args)
            if old is None:
                raise RuntimeError(
                    f"Cannot rollback sub_group_id {sub_group_id}: a gradient or an update was not finite. Check "
                    "gradients before step_subgroup, and restore the parameters from a checkpoint."
                )
            restored.append(old)
        for held, values in zip(zip(params, first, second), restored):
            for tensor, old in zip(held, values):
                tensor.copy_(old)
        state["step"] = int(state["step"]) - 1
        return loss

    def state_dict(self):
        """As of any torch optimizer; states of subgroups, if there are any, are below ``"subgroups"``, since ids below
        ``"state"`` are numbers of parameters."""
        kept = {key: self.state.pop(key) for key in list(self.state) if not torch.is_tensor(key)}
        try:
            found = super().state_dict()
        finally:
            self.state.update(kept)
        return {**found, "subgroups": {key: dict(state) for key, state in kept.items()}} if kept else found

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for key, state in state_dict.get("subgroups", {}).items():
            self.state[key] = {
                name: value.clone() if torch.is_tensor(value) else value for name, value in state.items()
            }
