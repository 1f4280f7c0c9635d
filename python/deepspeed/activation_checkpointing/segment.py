"""A checkpointed segment: the call, the state it ran in, and running it again in that state."""

import contextlib

import torch

from deepspeed._compat import autocast_now, no_autocast_cache
from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.settings import current, thread
from deepspeed.activation_checkpointing.tensors import Slot, fill, flatten
from deepspeed.utils.random_state import RandomState

FORWARD_TIMER = "checkpoint_forward"
RECOMPUTE_TIMER = "checkpoint_recompute"
BACKWARD_TIMER = "checkpoint_backward"


class Options:
    """The keywords that belong to checkpointing, not to the function: torch.utils.checkpoint's, and one of ours,
    ``keep_recomputed``: without re-entrance, what was computed again stays as long as the graph, for backwards in
    several parts."""

    NAMES = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "keep_recomputed")

    def __init__(
        self,
        use_reentrant=True,
        preserve_rng_state=True,
        context_fn=None,
        determinism_check="default",
        debug=False,
        keep_recomputed=False,
    ):
        if determinism_check not in ("default", "none"):
            raise ValueError(f"determinism_check must be 'default' or 'none', got {determinism_check!r}.")
        if debug:
            raise ValueError(
                "deepspeed.checkpointing has no debug mode: drop debug=True. When forward and recomputation differ, "
                "the error says what differs."
            )
        self.reentrant = use_reentrant is not False
        self.preserve_rng_state = preserve_rng_state
        self.contexts = context_fn() if context_fn is not None else (contextlib.nullcontext(),) * 2
        self.check = determinism_check == "default"
        self.keep_recomputed = keep_recomputed

    @classmethod
    def taken_from(cls, keywords):
        """Made from the options among ``keywords``, which are removed from them."""
        return cls(**{name: keywords.pop(name) for name in cls.NAMES if name in keywords})


class Call:
    """A call of ``function``, without the tensors in its arguments: they travel as a list beside it."""

    def __init__(self, function, args, kwargs, options):
        self.function = function
        self.options = options
        self._first = (args, kwargs)
        self._template, self.tensors = flatten((tuple(args), dict(kwargs)))
        self._state = self._autocast = None
        self.output_template = None

    @classmethod
    def positional(cls, function, args):
        """A call for which the list is ``args`` itself, in which other objects may stand between the tensors."""
        made = cls(function, (), {}, Options())
        made._first = (args, {})
        made._template, made.tensors = (tuple(map(Slot, range(len(args)))), {}), list(args)
        return made

    @property
    def name(self):
        return getattr(self.function, "__qualname__", None) or type(self.function).__qualname__

    def first(self):
        """Runs the function on its own arguments, remembering the state it runs in. Returns what it returns; the
        tensors are forgotten."""
        (args, kwargs), tensors = self._first, self.tensors
        self._first = self.tensors = None
        device = get_accelerator()
        self._autocast = autocast_now({"cpu", device.device_name()})
        self._state = RandomState(tensors) if self.options.preserve_rng_state else None
        del tensors
        with timed(FORWARD_TIMER), no_autocast_cache(), self.options.contexts[0]:
            return self.function(*args, **kwargs)

    def again(self, tensors):
        """Runs the function on ``tensors`` as it ran the first time, with gradients."""
        args, kwargs = fill(self._template, tensors)
        with contextlib.ExitStack() as stack:
            stack.enter_context(timed(RECOMPUTE_TIMER))
            if self._state is not None:
                stack.enter_context(self._state.replay(tensors))
            stack.enter_context(self._autocast())
            stack.enter_context(thread)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.options.contexts[1])
            return self.function(*args, **kwargs)


@contextlib.contextmanager
def timed(name):
    """Synchronises and measures as configured. What raised inside is not logged."""
    if not (current.synchronize or current.profile):
        yield
        return
    if current.synchronize:
        get_accelerator().synchronize()
    timer = current.timers(name)
    nested = getattr(timer, "started_", False)  # the outer segment's time has the inner one's in it
    if not nested:
        timer.start()
    try:
        yield
        if current.synchronize:
            get_accelerator().synchronize()
    except BaseException:
        if not nested:
            timer.reset()
        raise
    if not nested:
        timer.stop()
        current.timers.log([name])
