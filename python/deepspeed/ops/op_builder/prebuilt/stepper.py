"""One step of a native optimizer over lists of tensors: the ground under the functions of the optimizer ops."""

import threading

import torch

from deepspeed._native import _C


def has_rule(rule):
    """Whether the native module knows the optimizer ``rule`` ("adam")."""
    return rule in _C.optimizer_rules()


class Stepper:
    """Updates of one optimizer object; keeps its worker threads between steps. Python threads do not disturb each
    other: each has a runner of its own, because a step runs without the GIL."""

    def __init__(self, rule, title):
        self._rule, self._title = rule, title
        self._of_thread = threading.local()
        self._runner()  # an unknown rule is refused here

    def _runner(self):
        if not hasattr(self._of_thread, "runner"):
            self._of_thread.runner = _C.UpdateRunner(self._rule, self._title)
        return self._of_thread.runner

    def step(self, params, grads, states, hyper, step):
        """Update number ``step`` (from 1) of ``params`` in place, and of ``states``: one list of tensors per slot of
        the rule. ``hyper`` holds the rule's hyperparameters by name."""
        if not params:
            return
        with torch.no_grad():
            self._runner().step(
                list(params),
                list(grads),
                [list(slot) for slot in states],
                {name: float(value) for name, value in hyper.items()},
                float(step),
                torch.get_num_threads(),
            )

    def sums(self):
        """The sums over whole parameters of the last step: fp64, a row for each; None if the rule has no sums."""
        return self._runner().sums()


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
        """Forgets the optimizer and ends its worker threads; an unknown number is not an error."""
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
