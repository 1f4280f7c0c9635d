"""The base of optimizers whose ranks exchange signs. Such a step is the engine's
(``csrc/zero/step/compressed_step.h``)."""

import math

import torch

from deepspeed.ops.native_optimizer import NativeOptimizer, loss_of

BACKENDS = ("nccl", "hccl", "compressed", "mpi")
# States that belong to one rank. No file has them, and a load makes them start from zero.
ERRORS = ("worker_error", "server_error")
MASK = "exp_avg_mask"


class SignOptimizer(NativeOptimizer):
    """An optimizer of an engine at ZeRO stage 0. A step has *phases*, which the number of the update decides.

    ``deepspeed``: the engine, which published scripts pass; it is kept as an attribute. ``cuda_aware`` and
    ``comm_backend_name`` choose the transport of the signs: "nccl", "hccl" and "compressed" are the engine's.

    A parameter group may have the key ``exp_avg_mask``, a tensor in the shape of its parameters. What the ranks have
    received is multiplied by it: signs cannot say zero, so where gradients are always zero a mask has to.
    """

    one_scale = False
    script_keys = (MASK,)  # of parameter groups; the script sets them, and a checkpoint never does

    def __init__(self, params, defaults, deepspeed, cuda_aware, comm_backend_name, **fixed):
        if comm_backend_name not in BACKENDS:
            raise ValueError(
                f"{type(self).__name__}: comm_backend_name is one of {', '.join(BACKENDS)}, not {comm_backend_name!r}."
            )
        if defaults["max_grad_norm"] != 0:
            raise ValueError(
                f"{type(self).__name__}: max_grad_norm must be 0, because the engine clips gradients. Set the key "
                '"gradient_clipping" of the config.'
            )
        self.deepspeed, self.cuda_aware, self.comm_backend_name = deepspeed, bool(cuda_aware), comm_backend_name
        super().__init__(params, defaults, **fixed)

    def __getstate__(self):
        return {**super().__getstate__(), "deepspeed": None}

    def step(self, closure=None, grads=None):
        """One update of all parameters. Without an engine it is Adam's or LAMB's, as long as ranks would only add up
        gradients.

        Args:
            closure: recomputes the loss.
            grads: for old callers only, must be None.

        Returns:
            what ``closure`` returns, or None.

        Raises:
            RuntimeError: this step exchanges signs between ranks, which needs an engine.
        """
        if grads is not None:
            raise RuntimeError(f"{type(self).__name__}.step does not take grads: they are read from the parameters.")
        if self.fused_state is None:
            done = max((int(state.get("step", 0)) for state in self.state.values()), default=0)
            if done >= self.plain_steps():
                raise RuntimeError(
                    f"{type(self).__name__} makes step {done + 1} in an engine, because the ranks exchange signs: pass "
                    "the optimizer to deepspeed.initialize as optimizer=, and call engine.step()."
                )
            return super().step(closure)
        loss = loss_of(closure)
        self.fused_state.step()
        return loss

    def plain_steps(self):
        """The number of steps in which gradients are added up in full."""
        return math.inf if self.freeze_step == "auto" else self.freeze_step

    @property
    def _frozen(self):
        return self.fused_state is not None and self.fused_state.exchanges.frozen

    # ---- masks -------------------------------------------------------------------------------------------------------
    def masks(self):
        """``[(number of the parameter, its mask or None)]``."""
        params = [group for group in self.param_groups for _ in group["params"]]
        return [(number, group.get(MASK)) for number, group in enumerate(params)]

    # ---- saved states ------------------------------------------------------------------------------------------------
    def state_dict(self):
        """As of any optimizer of this library, without errors of exchanges and without masks."""
        found = super().state_dict()
        found["state"] = {
            index: {key: value for key, value in state.items() if key not in ERRORS}
            for index, state in found["state"].items()
        }
        for group in found["param_groups"]:
            group.pop(MASK, None)
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Restores hyperparameters, steps and moments; errors of exchanges start from zero, and masks stay those of the
        script."""
        own = [group.get(MASK) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, mask in zip(self.param_groups, own):
            group.pop(MASK, None)
            if mask is not None:
                group[MASK] = mask
        if self.fused_state is not None:
            self.fused_state.forget_exchanges()


def onebit_defaults(name, lr, bias_correction, betas, eps, weight_decay, max_grad_norm, amsgrad):
    """The defaults of the parameter groups."""
    if amsgrad:
        raise RuntimeError(f"{name} does not implement AMSGrad: pass amsgrad=False.")
    return dict(
        lr=lr, bias_correction=bool(bias_correction), betas=betas, eps=eps, weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
    )  # fmt: skip


def freeze_args(optimizer):
    """The hyperparameter ``freeze_step`` of the native rule; below 0 an engine decides."""
    if optimizer.freeze_step == "auto":
        return {"freeze_step": -1.0} if optimizer.fused_state is not None else {}
    return {"freeze_step": float(optimizer.freeze_step)}


def refuse_eps_inside(name, eps_inside_sqrt):
    if eps_inside_sqrt:
        raise ValueError(f"{name} adds eps outside of the square root: pass eps_inside_sqrt=False.")
