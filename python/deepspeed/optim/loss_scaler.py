"""Loss scalers for fp16: a fixed factor, and one that follows the overflows.

The rules are C++ (csrc/optim/loss_scaler.h). The objects hold nothing but plain attributes: checkpoints pickle them,
under the import path ``deepspeed.runtime.fp16.loss_scaler`` that files of this format have always named.
"""

import torch

from deepspeed import _native
from deepspeed.utils.forwarding import forwarded

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"

PICKLED_AS = "deepspeed.runtime.fp16.loss_scaler"


def to_python_float(t):
    """The number in a one-element tensor, or the number itself."""
    return t.item() if hasattr(t, "item") else float(t)


class LossScalerBase:
    """The interface of a scaler: ``loss_scale``, ``update_scale(overflow)`` after each step, and the state."""

    __module__ = PICKLED_AS

    dynamic = False
    dtype = None

    def __init__(self, cur_scale):
        self.cur_scale = cur_scale
        self.dynamic = False

    loss_scale = forwarded("cur_scale", False, "The factor for the next loss.")

    def scale_gradient(self, module, grad_in, grad_out):
        """A module's full backward hook that multiplies the gradients by the scale; keeps None."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def update_scale(self, overflow):
        """Tells the scaler how a step went; a fixed scale does not care."""

    def rules_and_state(self):
        """For a native step, which then moves the scale: see ``set_state``. None: it calls ``update_scale``."""
        return None

    def backward(self, loss, retain_graph=False):
        """Runs backward from the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)

    def state_dict(self):
        return dict(self.__dict__)

    def load_state_dict(self, state):
        """Continues where the saved scaler was. ValueError for the state of the other kind of scaler."""
        if bool(state.get("dynamic", self.dynamic)) != self.dynamic:
            kinds = {True: "dynamic", False: "static"}
            raise ValueError(
                f"the saved loss scale is {kinds[not self.dynamic]}, but this run's is {kinds[self.dynamic]}: set "
                f"fp16.loss_scale as in the run that saved it (0 means dynamic), or load without optimizer states."
            )
        for name in self.__dict__:
            if name in state:
                setattr(self, name, state[name])


class LossScaler(LossScalerBase):
    """A fixed scale."""

    __module__ = PICKLED_AS

    def __init__(self, scale=1):
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
            raise ValueError(f"loss scaler: scale = {scale!r} is not allowed: it must be a finite number above 0.")
        super().__init__(scale)

    def has_overflow(self, params):
        """Never: a fixed scale skips no step."""
        return False


class DynamicLossScaler(LossScalerBase):
    """A scale that is halved when gradients overflow and doubled after a while without (Micikevicius et al. 2018, 3.2).

    init_scale:    the scale of the first step.
    scale_factor:  what the scale is divided and multiplied by.
    scale_window:  clean steps in a row before it rises.
    min_scale:     it never falls below. An overflow there raises RuntimeError with raise_error_at_min_scale.
    delayed_shift: hysteresis: that many overflows until it falls; refilled when the scale rises, and with
                   consecutive_hysteresis by every clean step.
    """

    __module__ = PICKLED_AS

    settling = 0  # clean steps after the start or an overflow that the window does not count

    def __init__(
        self,
        init_scale=2**32,
        scale_factor=2.0,
        scale_window=1000,
        min_scale=1,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=torch.half,
    ):
        super().__init__(init_scale)
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.scale_factor, self.scale_window, self.min_scale = scale_factor, scale_window, min_scale
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dynamic, self.dtype = True, dtype
        self._rules()
        if not min_scale <= init_scale < float("inf"):
            raise ValueError(
                f"loss scaler: init_scale = {init_scale} is not allowed: it must be finite and not below "
                f"min_scale = {min_scale}. Raise fp16.initial_scale_power or lower fp16.min_loss_scale."
            )

    def _rules(self):
        return _native._C.loss_scaler.Rules(
            self.scale_factor, self.scale_window, self.min_scale, self.delayed_shift, self.consecutive_hysteresis,
            self.raise_error_at_min_scale, self.settling,
        )  # fmt: skip

    def rules_and_state(self):
        """None where a subclass has an ``update_scale`` of its own."""
        if type(self).update_scale is not DynamicLossScaler.update_scale:
            return None
        return self._rules(), (self.cur_scale, self.cur_iter, self.last_overflow_iter, self.cur_hysteresis)

    def set_state(self, scale, iteration, last_overflow, hysteresis):
        self.cur_scale, self.cur_iter, self.last_overflow_iter = scale, iteration, last_overflow
        self.cur_hysteresis = hysteresis

    def update_scale(self, overflow):
        """Moves the scale after a step; `overflow`: its gradients held inf or nan, so it was skipped."""
        self.set_state(
            *self._rules().next(
                self.cur_scale, self.cur_iter, self.last_overflow_iter, self.cur_hysteresis, bool(overflow)
            )
        )

    def go_on(self, saved):
        """Continues where a saved scaler was (its attributes), by the rules of this one: only how far it was counts."""
        keep = {
            "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis",
            "raise_error_at_min_scale", "dynamic", "dtype", "settling",
        }  # fmt: skip
        for name in vars(self).keys() & saved.keys() - keep:
            setattr(self, name, saved[name])
        self.cur_scale = max(self.cur_scale, self.min_scale)
        more = self.delayed_shift - saved.get("delayed_shift", self.delayed_shift)  # overflows tolerated than then
        if more:
            self.cur_hysteresis = min(max(self.cur_hysteresis + more, 1), self.delayed_shift)

    def has_overflow(self, params):
        """Whether any parameter's gradient holds inf or nan."""
        return any(p.grad is not None and self._has_inf_or_nan(p.grad) for p in params)

    @staticmethod
    def _has_inf_or_nan(x):
        values = x.coalesce().values() if x.is_sparse else x
        return not bool(torch.isfinite(values).all())


class UnshardedLossScaler(DynamicLossScaler):
    """The dynamic scale of the optimizers without ZeRO, which scripts know by other rules: it rises one step later
    after the start and after an overflow, tolerates no overflow unless told to, and at its minimum it stays."""

    settling = 1

    def __init__(self, raise_error_at_min_scale=False, **arguments):
        super().__init__(raise_error_at_min_scale=raise_error_at_min_scale, **arguments)


def CreateLossScaler(dtype, static_loss_scale, dynamic_scaling, dynamic_loss_args):
    """The scaler for a model dtype: dynamic or fixed for fp16, a fixed 1.0 for every other dtype.

    dynamic_loss_args: keyword arguments of DynamicLossScaler, or None for its defaults.
    """
    if dtype != torch.half:
        return LossScaler(scale=1.0)
    if dynamic_scaling:
        return DynamicLossScaler(dtype=dtype, **(dynamic_loss_args or {}))
    return LossScaler(scale=static_loss_scale)


def _of_scaler(name, without):
    return property(lambda self: getattr(self.loss_scaler, name, without))


class LossScaleConfig:
    """The scaler of an optimizer without ZeRO under the names that it shows as ``loss_scale_config``:
    ``dynamic_loss_scale``, ``cur_scale``, ``cur_iter``, ``last_overflow_iter``, ``scale_factor``, ``scale_window``,
    ``min_loss_scale``."""

    __module__ = PICKLED_AS

    def __init__(self, low_precision_dtype, dynamic_loss_scale, static_loss_scale=1.0, dynamic_loss_args=None):
        self.low_precision_dtype = low_precision_dtype
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        if self.dynamic_loss_scale and low_precision_dtype == torch.half:
            self.loss_scaler = UnshardedLossScaler(dtype=low_precision_dtype, **(dynamic_loss_args or {}))
        else:
            self.loss_scaler = CreateLossScaler(low_precision_dtype, static_loss_scale, False, None)

    cur_scale = forwarded("loss_scaler.cur_scale")
    cur_iter = _of_scaler("cur_iter", 0)
    last_overflow_iter = _of_scaler("last_overflow_iter", -1)
    scale_factor = _of_scaler("scale_factor", 1.0)
    scale_window = _of_scaler("scale_window", None)

    @property
    def min_loss_scale(self):
        return getattr(self.loss_scaler, "min_scale", self.loss_scaler.cur_scale)
