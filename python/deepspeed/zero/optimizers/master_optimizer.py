"""16-bit weights with fp32 masters: behind the optimizer that ``deepspeed.initialize`` returns for fp16 and bf16.

The inner optimizer updates fp32 master weights; the model computes with 16-bit ones. Masters, gradients and moments
are views of the core's flat buffers.
"""

import torch

from deepspeed.utils.forwarding import forwarded
from deepspeed.zero.optimizers.base_optimizer import DeepSpeedOptimizer


class MasterOptimizer(DeepSpeedOptimizer):
    """Wraps ``init_optimizer``, whose parameter groups keep their identity: schedulers made for them stay valid.

    ``engine`` owns the core; without one the optimizer makes a core of its own for one process. ``clip_grad`` is the
    maximum 2-norm of the gradients, 0 for none. Saved states have the parameters of a group in one flat tensor;
    ``saved_form(state, names, shapes)`` makes a ``SavedState`` of them.
    """

    saved_form = None

    masters_key = "fp32_groups_flat"  # of the saved state

    def __init__(self, init_optimizer, engine, loss_scale_config, low_precision_dtype, clip_grad):
        self.optimizer = init_optimizer
        self.low_precision_dtype = low_precision_dtype
        self.loss_scale_config = loss_scale_config
        self.fp16_groups = [list(group["params"]) for group in init_optimizer.param_groups]
        self._start(engine, loss_scale_config.loss_scaler, clip_grad)

    bit16_groups = forwarded("fp16_groups", False)

    @property
    def fp32_groups_flat(self):
        """List with one flat fp32 tensor (a copy) for each parameter group, in group order, without padding."""
        return [
            torch.cat([m.detach().reshape(-1) for m in group]) if group else torch.zeros(0)
            for group in self.fp32_groups
        ]

    # ---- state -----------------------------------------------------------------------------------------------------
    def state_dict(self):
        """The keys of the 16-bit wrapper without ZeRO: flat fp32 groups and the inner state over them."""
        state = {
            "optimizer_state_dict": self._inner_state_dict(),
            self.masters_key: self._saved_masters(),
            "clip_grad": self.clip_grad,
        }
        if self.needs_scaler():
            state.update(self._scaler_state())
        return state

    def _saved_masters(self):
        return self.fp32_groups_flat

    def _inner_state_dict(self):
        """The inner state with each group's parameters as one flat tensor."""
        groups, state = [], {}
        for index, group in enumerate(self.optimizer.param_groups):
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": [index]})
            per_param = [self.optimizer.state[p] for p in group["params"]]
            if not per_param:
                continue
            steps = [int(s["step"]) for s in per_param]
            names = [name for name in per_param[0] if name != "step"]
            state[index] = {
                "step": max(steps),
                **{name: torch.cat([s[name].reshape(-1) for s in per_param]) for name in names},
            }
            if len(set(steps)) > 1:  # parameters that were unused in some steps
                state[index]["param_steps"] = steps
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict, load_optimizer_states=True):
        """Inverse of ``state_dict``. Raises ValueError naming the group when sizes do not fit."""
        if self.masters_key not in state_dict:
            raise ValueError(
                f"the saved optimizer has no '{self.masters_key}' (its keys: {', '.join(sorted(state_dict))}): it was "
                "saved by a run "
                "with another precision or another kind of optimizer. Load it with load_optimizer_states=False, or "
                "use the config it was saved with."
            )
        params = [param for group in self.fp16_groups for param in group]
        shapes = {name: param.shape for name, param in zip(self.stepping.names, params)}
        saved = self.saved_form(state_dict, self.stepping.names_of(self.fp16_groups), shapes)
        self._restore(saved, load_optimizer_states, True)


class UnfusedMasterOptimizer(MasterOptimizer):
    """The same for optimizers other than ``FusedAdam``: their state is kept parameter by parameter, as they made it."""

    masters_key = "fp32_groups"

    def _saved_masters(self):
        return [[m.detach().clone() for m in group] for group in self.fp32_groups]

    def _inner_state_dict(self):
        return self.optimizer.state_dict()
