"""The base of all optimizers with native kernels: a torch optimizer around one rule of ``csrc/optim``.

This module knows only a rule's name, its state slots and its hyperparameters (``_C.optimizer_rules()``). A subclass
names its rule and gives the defaults of its parameter groups.
"""

import collections

import torch

from deepspeed._native import _C

RULES = _C.optimizer_rules()


def adam_defaults(lr, bias_correction, betas, eps, weight_decay):
    """The defaults of the parameter groups of Adam and its variants."""
    return dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)


def loss_of(closure):
    """The result of ``closure``, called with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class NativeOptimizer(torch.optim.Optimizer):
    """A native rule over fp32, bf16 and fp16 parameters; arithmetic is fp32, results round to nearest even.

    ``state[p]`` holds ``step`` (int, updates of this parameter so far) and the slots of the rule (shaped like the
    parameter; fp32, or the parameter's dtype where ``fp32_states`` is false).

    Args:
        params: iterable of parameters or of parameter groups.
        defaults: of the parameter groups. Hyperparameters of the rule are read from a group by name; ``beta1`` and
            ``beta2`` from its ``betas``.
        fp32_states: keep the states of 16-bit parameters in fp32.
        fixed: hyperparameters of the rule that are the same for all groups and not among their keys.

    Raises:
        ValueError: a hyperparameter is out of range.
        RuntimeError: ``amsgrad`` is asked for.
    """

    rule = None
    # Set it to True, and bf16 parameters (and bf16 states) are rounded up or down at random instead of to the nearest,
    # so that small updates are not lost. Reproducible: the numbers depend on ``torch.initial_seed()`` at construction,
    # the parameter's position and the step. fp32 masters, which an engine keeps, need none.
    stochastic_rounding = False
    # Set by an engine whose flat buffers hold the parameters and states: steps and loaded states go there.
    fused_state = None

    def __init__(self, params, defaults, fp32_states=True, **fixed):
        self._fp32_states = bool(fp32_states)
        self._seed = torch.initial_seed()
        self._fixed = fixed
        self._runners = {}
        super().__init__(params, defaults)

    def rule_of(self, group):
        """Name of the rule that updates a parameter group."""
        return self.rule

    def slots_of(self, group):
        """Names of the states of the parameters of a group."""
        return RULES[self.rule_of(group)]["slots"]

    def rule_args(self, group):
        """The hyperparameters of one parameter group by the rule's own names, all as floats."""
        values = {**dict(zip(("beta1", "beta2"), group.get("betas", ()))), **group, **self._fixed}
        return {name: float(values[name]) for name in RULES[self.rule_of(group)]["hyper"] if name in values}

    def _check_group(self, group):
        name = type(self).__name__
        if group.get("amsgrad", False):
            raise RuntimeError(
                f"{name} does not implement AMSGrad: pass amsgrad=False, or use torch.optim.AdamW(..., amsgrad=True)."
            )
        if len(group.get("betas", (0, 0))) != 2:
            raise ValueError(f"{name}: betas must be two numbers, got {group['betas']!r}.")
        for key, value in self.rule_args(group).items():
            beta = key in ("beta1", "beta2")
            if not value >= 0 or (beta and value >= 1):
                shown = f"betas[{int(key[4]) - 1}]" if beta else key
                bound = "at least 0 and below 1" if beta else "at least 0"
                raise ValueError(f"{name}: {shown} must be {bound}, got {value}.")

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self._check_group(self.param_groups[-1])

    # A copied or unpickled optimizer gets native objects, hence worker threads, of its own.
    def __getstate__(self):
        state = self.__dict__.copy()
        state.pop("_runners", None)
        state.pop("fused_state", None)
        state.pop("add_param_group", None)  # of an engine
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self._runners = {}

    def state_dtype(self, param):
        """dtype of the states of a parameter."""
        return torch.float32 if self._fp32_states else param.dtype

    def _init_state(self, param, slots):
        state = self.state[param]
        state["step"] = int(state.get("step", 0))
        for slot in slots:
            if slot not in state:
                state[slot] = torch.zeros_like(
                    param, dtype=self.state_dtype(param), memory_format=torch.preserve_format
                )
        return state

    def magnification(self, group):
        """The factor by which a relative difference between two gradients may grow in their updates."""
        return 1.0

    def check_engine(self):
        """Raise where an engine cannot run this optimizer; overridden by subclasses."""

    def _gradient(self, param):
        """The gradient of a parameter in a step outside an engine, or None."""
        return param.grad

    def _check_param(self, param):
        """Raise where this class does not take a parameter; overridden by subclasses."""

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient.

        Args:
            closure: recomputes the loss; it runs with gradients enabled.

        Returns:
            what ``closure`` returns, or None.
        """
        loss = loss_of(closure)
        if self.fused_state is not None:  # an engine owns the buffers
            self.fused_state.step()
            return loss
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group):
        """One update of every parameter of the group that has a gradient."""
        # Parameters of one device and one step count share a call. Nearly always that is one call per group.
        slots = self.slots_of(group)
        calls = collections.defaultdict(lambda: ([], [], []))
        for param in group["params"]:
            grad = self._gradient(param)
            if grad is None:
                continue
            self._check_param(param)
            state = self.state[param]
            if len(state) <= len(slots):  # step, and one for each slot
                state = self._init_state(param, slots)
            call = calls[param.device, int(state["step"]) + 1]
            call[0].append(param)
            call[1].append(grad)
            call[2].append(state)
        args = self.rule_args(group) if calls else None
        for (device, step), (params, grads, states) in calls.items():
            tensors = [[state[slot] for state in states] for slot in slots]
            self._update(self.rule_of(group), args, device, step, params, grads, tensors)
            for state in states:  # not before: a refused tensor must leave the counts alone
                state["step"] = step

    def _runner(self, rule):
        if rule not in self._runners:
            self._runners[rule] = _C.UpdateRunner(rule, type(self).__name__)
        return self._runners[rule]

    def _update(self, rule, args, device, step, params, grads, states):
        """One native update of ``params`` with ``states[slot][parameter]``."""
        random = {}
        if self.stochastic_rounding and any(param.dtype == torch.bfloat16 for param in params):
            positions = {}
            for group in self.param_groups:
                positions.update({param: len(positions) + index for index, param in enumerate(group["params"])})
            random = {
                "seed": (self._seed ^ (step << 40)) & 0xFFFFFFFFFFFFFFFF,
                "streams": [positions[param] for param in params],
            }
        self._runner(rule).step(params, grads, states, args, step=step, threads=torch.get_num_threads(), **random)

    @torch.no_grad()
    def updated(self, group, weight, grad, states, step):
        """One whole parameter after the ``step``-th update, in fp32; no argument is changed.

        ``states``: slot -> tensor; ``grad`` is unscaled and clipped.
        """
        weight = weight.float().clone()
        slots = [[states[slot].float().clone()] for slot in self.slots_of(group)]
        grad = grad.float().contiguous()
        self._update(self.rule_of(group), self.rule_args(group), weight.device, step, [weight], [grad], slots)
        return weight

    def state_dict(self):
        """As of any torch optimizer; steps are numbers. Inside an engine parameters that have seen no update are left
        out, as they are outside of one, where states are made by the first."""
        found = super().state_dict()
        if self.fused_state is not None:
            found["state"] = {index: self.fused_state.read(index, state) for index, state in found["state"].items()}
        found["state"] = {
            index: {**state, "step": int(state["step"])} if "step" in state else state
            for index, state in found["state"].items()
            if self.fused_state is None or int(state.get("step", 1))
        }
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Restore hyperparameters and state; the states keep their own dtype.

        torch would round fp32 states to the dtype of a 16-bit parameter.
        """
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [(param, self.slots_of(group)) for group in self.param_groups for param in group["params"]]
        for index, (param, slots) in zip(saved, params, strict=True):
            given = state_dict["state"].get(index)
            if not given:
                continue
            state = self.state[param]
            if "step" in given:
                state["step"] = int(given["step"])
            for slot in slots:
                if slot in given:
                    device = given[slot].device if param.is_meta else param.device  # an engine's, in a file
                    own = torch.empty_like(param, dtype=self.state_dtype(param), device=device)
                    state[slot] = own.copy_(given[slot].reshape(param.shape))
        if self.fused_state is not None:
            self.fused_state.adopt()
