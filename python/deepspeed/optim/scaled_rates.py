"""Learning rates that follow the number of samples in a step."""

import functools
import math

from deepspeed.optim.lr_schedules import get_torch_optimizer, set_rate

SCALES = {"linear": lambda ratio: ratio, "sqrt": math.sqrt, "none": lambda ratio: 1.0}


class ScaledRates:
    """The rates of ``scheduler``, or without one those that the parameter groups have now, times a factor.

    ratio: function that returns the samples of the next step, divided by the usual number. method: "linear", "sqrt" or
    "none". What this class has not is asked of ``scheduler``.
    """

    def __init__(self, optimizer, scheduler, ratio, method):
        self.optimizer = get_torch_optimizer(optimizer)
        self._schedulers = [scheduler] if scheduler is not None else []
        self._ratio, self._scale = ratio, SCALES[method]
        self._rates = self._written()
        self.rescale(ratio())

    def __getattr__(self, name):
        inner = self.__dict__.get("_schedulers")
        if not inner or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(inner[0], name)

    def _written(self):
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def rescale(self, ratio):
        """The next step has ``ratio`` times the usual number of samples."""
        for group, rate in zip(self.optimizer.param_groups, self._rates):
            set_rate(group, rate * self._scale(ratio))

    @property
    def step(self):
        """``step(...)`` takes the arguments of the inner schedule's."""
        inner = self._schedulers[0].step if self._schedulers else lambda: None

        @functools.wraps(inner)
        def step(*args, **kwargs):
            for group, rate in zip(self.optimizer.param_groups, self._rates):
                set_rate(group, rate)
            inner(*args, **kwargs)
            self._rates = self._written()
            self.rescale(self._ratio())

        return step

    def get_last_lr(self):
        """Rates of the parameter groups, one for each."""
        return self._written()

    def get_lr(self):
        """Rates of the parameter groups, one for each."""
        return self._written()

    def state_dict(self):
        inner = self._schedulers[0].state_dict() if self._schedulers else None
        return {"scheduler": inner, "unscaled_rates": list(self._rates)}

    def load_state_dict(self, state):
        """Also of the inner schedule alone, from a run without dynamic batches."""
        own = "unscaled_rates" in state
        if self._schedulers:
            self._schedulers[0].load_state_dict(state["scheduler"] if own else state)
        self._rates = list(state["unscaled_rates"]) if own else self._written()
        self.rescale(self._ratio())
