"""What DeepSpeedCPUAdam and FusedAdam share: a torch optimizer around the native Adam kernel.

The update is Adam (Kingma & Ba 2015, algorithm 1) or AdamW (Loshchilov & Hutter 2019, algorithm 2); the exact order
of operations is in ``csrc/kernels/adam.h``.
"""

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator


class NativeAdam(torch.optim.Optimizer):
    """Adam over fp32, bf16 and fp16 parameters; arithmetic is fp32, results round to nearest even.

    ``state[p]`` holds ``step`` (int, updates of this parameter so far), ``exp_avg`` and ``exp_avg_sq`` (shaped like
    the parameter; fp32, or the parameter's dtype where ``fp32_states`` is false).

    Raises:
        ValueError: a hyperparameter is out of range.
        RuntimeError: ``amsgrad`` is asked for.
    """

    # Set by an engine whose flat buffers hold the parameters and moments: steps and loaded states go there.
    fused_state = None

    def __init__(self, params, defaults, adamw, fp32_states):
        name = type(self).__name__
        if defaults.get("amsgrad", False):
            raise RuntimeError(
                f"{name} does not implement AMSGrad: pass amsgrad=False, or use torch.optim.AdamW(..., amsgrad=True)."
            )
        super().__init__(params, defaults)
        for group in self.param_groups:
            self._check_group(group)
        self._adamw = bool(adamw)
        self._fp32_states = bool(fp32_states)
        self._kernel = _C.AdamKernel()

    def _check_group(self, group):
        name = type(self).__name__
        beta1, beta2 = group["betas"]
        for key, value, low, high in (
            ("lr", group["lr"], 0, None),
            ("betas[0]", beta1, 0, 1),
            ("betas[1]", beta2, 0, 1),
            ("eps", group["eps"], 0, None),
            ("weight_decay", group["weight_decay"], 0, None),
        ):
            if not value >= low or (high is not None and value >= high):
                bound = f"at least {low}" + (f" and below {high}" if high is not None else "")
                raise ValueError(f"{name}: {key} must be {bound}, got {value}.")
        if group.get("amsgrad", False):
            raise RuntimeError(f"{name} does not implement AMSGrad: a parameter group asks for amsgrad=True.")

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self._check_group(self.param_groups[-1])

    # A copied or unpickled optimizer gets a kernel object, hence worker threads, of its own.
    def __getstate__(self):
        state = self.__dict__.copy()
        state.pop("_kernel", None)
        state.pop("fused_state", None)
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self._kernel = _C.AdamKernel()

    def adam_args(self, group):
        """The hyperparameters of one parameter group, as the native engine takes them.

        Returns:
            dict with lr, beta1, beta2, eps, weight_decay (float), adamw, bias_correction (bool).
        """
        beta1, beta2 = group["betas"]
        return {
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "adamw": self._adamw,
            "bias_correction": bool(group["bias_correction"]),
        }

    def state_dtype(self, param):
        """dtype of ``exp_avg`` and ``exp_avg_sq`` of a parameter."""
        return torch.float32 if self._fp32_states else param.dtype

    def _init_state(self, param):
        state = self.state[param]
        if "exp_avg" not in state:
            dtype = self.state_dtype(param)
            state["step"] = int(state.get("step", 0))
            state["exp_avg"] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        return state

    def _check_param(self, param):
        """Raise where this class does not take a parameter; overridden by subclasses."""

    def _step_all(self):
        """One update of every parameter that has a gradient, by the engine that owns the buffers if one does."""
        if self.fused_state is not None:
            self.fused_state.step()
            return
        for group in self.param_groups:
            self._step_group(group)

    def _step_group(self, group):
        """One update of every parameter of the group that has a gradient."""
        # Parameters of one device and one step count share a call. Nearly always that is one call per group.
        calls = {}
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            self._check_param(param)
            state = self.state[param]
            if "exp_avg" not in state:
                state = self._init_state(param)
            key = (param.device, int(state["step"]) + 1)
            call = calls.get(key)
            if call is None:
                call = calls[key] = ([], [], [], [], [])
            call[0].append(param)
            call[1].append(grad)
            call[2].append(state["exp_avg"])
            call[3].append(state["exp_avg_sq"])
            call[4].append(state)
        args = self.adam_args(group) if calls else None
        for (device, step), (*tensors, states) in calls.items():
            self._update(device, step, tensors, args)
            for state in states:  # not before: a refused tensor must leave the counts alone
                state["step"] = step

    def _update(self, device, step, tensors, args):
        correct = args["bias_correction"]
        stream = get_accelerator().current_stream(device).cuda_stream if device.type == "cuda" else 0
        self._kernel.step(
            *tensors,
            lr=args["lr"],
            beta1=args["beta1"],
            beta2=args["beta2"],
            eps=args["eps"],
            weight_decay=args["weight_decay"],
            adamw=args["adamw"],
            bias_correction1=1.0 - args["beta1"] ** step if correct else 1.0,
            bias_correction2=1.0 - args["beta2"] ** step if correct else 1.0,
            threads=torch.get_num_threads(),
            stream=stream,
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Restore hyperparameters and state; the moments keep their own dtype.

        torch would round fp32 moments to the dtype of a 16-bit parameter.
        """
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            given = state_dict["state"].get(index)
            if not given:
                continue
            state = self.state[param]
            if "step" in given:
                state["step"] = int(given["step"])
            for key in ("exp_avg", "exp_avg_sq"):
                if key in given:
                    moment = torch.empty_like(param, dtype=self.state_dtype(param))
                    state[key] = moment.copy_(given[key].reshape(param.shape))
        if self.fused_state is not None:
            self.fused_state.adopt()
