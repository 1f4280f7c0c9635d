"""One step of a native optimizer over lists of tensors: the ground under the functions of the optimizer ops."""

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator


def has_rule(rule):
    """Whether the native module knows the optimizer ``rule`` ("adam")."""
    return rule in _C.optimizer_rules() if hasattr(_C, "optimizer_rules") else rule == "adam"


class Stepper:
    """Updates of one optimizer object; keeps its worker threads between steps."""

    def __init__(self, rule, title):
        self._kernel = _C.UpdateRunner(rule, title) if hasattr(_C, "UpdateRunner") else _C.AdamKernel()

    def step(self, params, grads, states, hyper, step):
        """Update number ``step`` (from 1) of ``params`` in place, and of ``states``: one list of tensors per slot of
        the rule. ``hyper`` holds the rule's hyperparameters by name."""
        if not params:
            return
        device = params[0].device
        stream = get_accelerator().current_stream(device).cuda_stream if device.type == "cuda" else 0
        threads = torch.get_num_threads()
        with torch.no_grad():
            if hasattr(_C, "UpdateRunner"):
                self._kernel.step(list(params), list(grads), [list(slot) for slot in states],
                                  {name: float(value) for name, value in hyper.items()}, float(step), threads,
                                  stream)  # fmt: skip
                return
            correct = hyper["bias_correction"]
            self._kernel.step(
                list(params), list(grads), *[list(slot) for slot in states], lr=hyper["lr"], beta1=hyper["beta1"],
                beta2=hyper["beta2"], eps=hyper["eps"], weight_decay=hyper["weight_decay"],
                adamw=bool(hyper["decoupled"]), threads=threads, stream=stream,
                bias_correction1=1 - hyper["beta1"] ** step if correct else 1.0,
                bias_correction2=1 - hyper["beta2"] ** step if correct else 1.0,
            )  # fmt: skip

    def sums(self):
        """What the last step summed over whole parameters: fp64, a row for each; None where the rule sums nothing."""
        return self._kernel.sums()


class Handles:
    """Optimizers by the number that a script gave them."""

    def __init__(self, rule, title, function):
        self._rule, self._title, self._function = rule, title, function
        self._made = {}

    def create(self, optimizer_id, **settings):
        """Makes (or makes anew) the optimizer of that number; ``settings`` are kept with it."""
        self._made[optimizer_id] = (Stepper(self._rule, self._title), settings)
        return 0

    def destroy(self, optimizer_id):
        """Forgets it; a number that nobody has is not an error."""
        self._made.pop(optimizer_id, None)
        return 0

    def get(self, optimizer_id):
        """``(Stepper, settings)``; ValueError for a number that was not created or was destroyed."""
        try:
            return self._made[optimizer_id]
        except KeyError:
            known = ", ".join(map(str, sorted(self._made))) or "none"
            raise ValueError(
                f"there is no {self._title} optimizer number {optimizer_id} (there are: {known}): call "
                f"{self._function}({optimizer_id}, ...) before the first update."
            ) from None
