"""16-bit weights with fp32 masters: the optimizer that ``deepspeed.initialize`` returns for fp16 and bf16.

The inner optimizer updates fp32 master weights; the model computes with 16-bit ones. Masters, gradients and moments
are views of the core's flat buffers.
"""

import torch

from deepspeed.optim.loss_scaler import LossScaleConfig
from deepspeed.zero.base_optimizer import DeepSpeedOptimizer
from deepspeed.zero.core import build_core
from deepspeed.zero.fused_state import FusedState
from deepspeed.zero.stepping import Stepping

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class FP16_Optimizer(DeepSpeedOptimizer):
    """Wraps ``init_optimizer``, whose parameter groups keep their identity: schedulers made for them stay valid.

    Arguments are those of the contract. ``deepspeed`` is the engine that owns the core; without one the optimizer
    makes a core of its own for one process. ``loss_scale_config`` is a ``LossScaleConfig``; without one it is made from
    ``static_loss_scale``, ``dynamic_loss_scale``, ``initial_dynamic_scale`` and ``dynamic_loss_args``. ``clip_grad`` is
    the maximum 2-norm of the gradients, 0 for none. The other arguments exist for old callers and change nothing.
    """

    flat = True

    def __init__(
        self,
        init_optimizer,
        deepspeed=None,
        loss_scale_config=None,
        low_precision_dtype=torch.float16,
        static_loss_scale=1.0,
        dynamic_loss_scale=False,
        initial_dynamic_scale=2**32,
        dynamic_loss_args=None,
        verbose=True,
        mpu=None,
        clip_grad=0.0,
        fused_adam_legacy=False,
        has_moe_layers=False,
        timers=None,
    ):
        self.optimizer = init_optimizer
        self.low_precision_dtype = low_precision_dtype
        self.fp16_groups = [list(group["params"]) for group in init_optimizer.param_groups]
        core, names, check, rank = getattr(deepspeed, "core_for_optimizer", lambda _: (None, None, None, 0))(
            init_optimizer
        )
        if core is None:
            core, names = build_core(init_optimizer.param_groups)
            check = True
        self.core = core
        if loss_scale_config is None:
            if dynamic_loss_scale and dynamic_loss_args is None:
                dynamic_loss_args = {"init_scale": initial_dynamic_scale}
            loss_scale_config = LossScaleConfig(
                low_precision_dtype, dynamic_loss_scale, static_loss_scale, dynamic_loss_args
            )
        self.loss_scale_config = loss_scale_config
        self.loss_scaler = loss_scale_config.loss_scaler
        self._take_masters()
        self.stepping = Stepping(
            core,
            init_optimizer,
            [master for group in self.fp32_groups for master in group],
            names,
            scaler=self.loss_scaler,
            check=check,
            clip=clip_grad,
            rank=rank,
        )
        if hasattr(init_optimizer, "adam_args"):
            masters = self.stepping.masters
            self.stepping.fused = FusedState(core, init_optimizer, masters, range(len(masters)), self.step)
            init_optimizer.fused_state = self.stepping.fused

    def _take_masters(self):
        """Puts fp32 masters in the place of the 16-bit parameters in the inner optimizer."""
        masters = iter(self.core.masters())
        self.fp32_groups = []
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            replaced = []
            for param in group["params"]:
                master = torch.nn.Parameter(next(masters), requires_grad=param.requires_grad)
                if param in state:
                    state[master] = state.pop(param)
                replaced.append(master)
            group["params"] = replaced
            self.fp32_groups.append(replaced)

    # ---- what users read -------------------------------------------------------------------------------------------
    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value):
        self.optimizer.param_groups = value

    @property
    def state(self):
        return self.optimizer.state

    @state.setter
    def state(self, value):
        self.optimizer.state = value

    @property
    def bit16_groups(self):
        return self.fp16_groups

    @property
    def fp32_groups_flat(self):
        """List with one flat fp32 tensor (a copy) for each parameter group, in group order, without padding."""
        return [
            torch.cat([m.detach().reshape(-1) for m in group]) if group else torch.zeros(0)
            for group in self.fp32_groups
        ]

    @property
    def overflow(self):
        return self.stepping.overflow

    @property
    def loss_scale(self):
        return self.stepping.loss_scale

    @loss_scale.setter
    def loss_scale(self, value):
        self.override_loss_scale(value)

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self):
        return bool(self.loss_scaler.dynamic)

    @property
    def clip_grad(self):
        return self.stepping.clip

    @clip_grad.setter
    def clip_grad(self, value):
        self.stepping.clip = value

    @property
    def _global_grad_norm(self):
        return self.stepping.norm

    def needs_scaler(self):
        """True when a loss must be scaled before a backward that the user runs."""
        return self.low_precision_dtype == torch.float16

    def get_lr(self):
        return self.optimizer.param_groups[0]["lr"]

    def set_lr(self, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def override_loss_scale(self, loss_scale):
        """Fixes the current loss scale; a dynamic scaler goes on from there."""
        self.loss_scaler.cur_scale = loss_scale

    # ---- training --------------------------------------------------------------------------------------------------
    def backward(self, loss, create_graph=False, retain_graph=False):
        """Scales ``loss`` (a scalar) and runs its backward; gradients land in the flat buffers."""
        self.core.watch()
        self.core.begin_backward(True)
        try:
            (loss.float() * self.loss_scale).backward(create_graph=create_graph, retain_graph=retain_graph)
        except BaseException:
            self.core.abort_backward()
            raise
        self.core.end_backward()

    def step(self, closure=None):
        """Unscales, clips, updates and casts. Nothing changes when a gradient is not finite: see ``overflow``."""
        if closure is not None:
            raise ValueError(
                "closures are not supported: with a loss scale the gradients of a closure cannot be checked first"
            )
        return self.stepping.step()

    def zero_grad(self, set_to_none=True):
        self.core.clear_grads()

    def refresh_fp32_params(self):
        """Masters take the model's current 16-bit weights, after somebody has loaded those."""
        self.core.refresh_master()

    def initialize_optimizer_states(self):
        self.core.slots(1)

    # ---- state -----------------------------------------------------------------------------------------------------
    def state_dict(self):
        """The keys of the 16-bit wrapper without ZeRO: flat fp32 groups and the inner state over them."""
        state = {
            "optimizer_state_dict": self._inner_state_dict(),
            "fp32_groups_flat" if self.flat else "fp32_groups": self._saved_masters(),
            "clip_grad": self.clip_grad,
        }
        if self.needs_scaler():
            state["dynamic_loss_scale"] = self.dynamic_loss_scale
            state["cur_scale"] = self.loss_scale
            state["cur_iter"] = getattr(self.loss_scaler, "cur_iter", 0)
            if self.dynamic_loss_scale:
                state["last_overflow_iter"] = self.loss_scaler.last_overflow_iter
                state["scale_factor"] = self.loss_scaler.scale_factor
                state["scale_window"] = self.loss_scaler.scale_window
                state["cur_hysteresis"] = self.loss_scaler.cur_hysteresis
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
            state[index] = {
                "step": max(steps),
                "exp_avg": torch.cat([s["exp_avg"].reshape(-1) for s in per_param]),
                "exp_avg_sq": torch.cat([s["exp_avg_sq"].reshape(-1) for s in per_param]),
            }
            if len(set(steps)) > 1:  # parameters that were unused in some steps
                state[index]["param_steps"] = steps
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict, load_optimizer_states=True):
        """Inverse of ``state_dict``. Raises ValueError naming the group when sizes do not fit."""
        masters_key = "fp32_groups_flat" if self.flat else "fp32_groups"
        if masters_key not in state_dict:
            raise ValueError(
                f"the saved optimizer has no '{masters_key}' (its keys: {', '.join(sorted(state_dict))}): it was "
                "saved by a run "
                "with another precision or another kind of optimizer. Load it with load_optimizer_states=False, or "
                "use the config it was saved with."
            )
        if load_optimizer_states:
            self._load_inner(state_dict["optimizer_state_dict"])
        self._load_masters(state_dict[masters_key])
        self.core.publish()
        if self.needs_scaler() and "cur_scale" in state_dict:
            self.loss_scaler.cur_scale = state_dict["cur_scale"]
            self.loss_scaler.cur_iter = state_dict.get("cur_iter", 0)
            if self.dynamic_loss_scale and state_dict.get("dynamic_loss_scale"):
                self.loss_scaler.last_overflow_iter = state_dict["last_overflow_iter"]
                if "cur_hysteresis" in state_dict:
                    self.loss_scaler.cur_hysteresis = state_dict["cur_hysteresis"]

    def _load_masters(self, saved):
        if len(saved) != len(self.fp32_groups):
            raise ValueError(
                f"the saved optimizer has {len(saved)} parameter groups, this one has {len(self.fp32_groups)}"
            )
        for index, (flat, group) in enumerate(zip(saved, self.fp32_groups)):
            self._scatter(flat, group, f"the fp32 weights of group {index}")

    @staticmethod
    def _scatter(flat, targets, what):
        total = sum(t.numel() for t in targets)
        if flat.numel() != total:
            raise ValueError(
                f"{what}: {flat.numel()} elements are saved, the model has {total}; it is of another model"
            )
        offset = 0
        with torch.no_grad():
            for target in targets:
                target.copy_(flat[offset : offset + target.numel()].reshape(target.shape))
                offset += target.numel()

    def _load_inner(self, saved):
        for index, (group, saved_group) in enumerate(zip(self.optimizer.param_groups, saved["param_groups"])):
            group.update({k: v for k, v in saved_group.items() if k != "params"})
            state = saved["state"].get(index)
            if state is None:
                continue
            own = [self.optimizer.state[p] for p in group["params"]]
            for name in ("exp_avg", "exp_avg_sq"):
                self._scatter(state[name], [s[name] for s in own], f"{name} of group {index}")
            steps = state.get("param_steps", [state["step"]] * len(own))
            for s, step in zip(own, steps):
                s["step"].fill_(float(step))

    def destroy(self):
        self.optimizer = None
        self.stepping.fused = None


class FP16_UnfusedOptimizer(FP16_Optimizer):
    """The same for optimizers other than ours: their state is kept parameter by parameter, as they made it."""

    flat = False

    def _saved_masters(self):
        return [[m.detach().clone() for m in group] for group in self.fp32_groups]

    def _inner_state_dict(self):
        return self.optimizer.state_dict()

    def _load_inner(self, saved):
        self.optimizer.load_state_dict(saved)

    def _load_masters(self, saved):
        if [len(g) for g in saved] != [len(g) for g in self.fp32_groups]:
            raise ValueError("the saved optimizer has other parameter groups than this one")
        with torch.no_grad():
            for saved_group, group in zip(saved, self.fp32_groups):
                for value, master in zip(saved_group, group):
                    master.copy_(value)
