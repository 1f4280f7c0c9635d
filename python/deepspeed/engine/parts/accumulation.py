"""The accumulation window of an engine, for scripts: boundaries, ``no_sync``, reductions by hand, counters.

``engine._window`` (csrc/zero/gradients/window.h) counts the micro-steps and answers whether a backward reduces.
"""

import contextlib

from deepspeed import _native
from deepspeed.engine.members import Part, engine_parts, member


@engine_parts.add("_accumulation")
class Accumulation(Part):
    """A part of the engine. Tells the window what the configuration, the loss scaler and the data loader say."""

    def __init__(self, engine):
        super().__init__(engine)
        engine._window = _native._C.Window()
        engine._window.managed = engine.managed_gradient_accumulation()

    def start(self):
        if self.engine._trains:
            self.engine.core.register_hooks()
        self.tell()

    def tell(self):
        """Tells the window the accumulation steps, the loss scale and the weight of this micro-batch as they are now,
        and the answer of a method that a script or a subclass has replaced. Returns the window."""
        engine, window = self.engine, self.engine._window
        scale = engine.stepping.loss_scale if engine._trains else 1.0
        window.tell(engine.gradient_accumulation_steps(), scale, engine._dynamic.weight())
        window.answer_boundary(engine.is_gradient_accumulation_boundary())
        return window

    def need_no_window(self, asked):
        """RuntimeError if an accumulation window has begun: its gradients were divided by the sizes up to now."""
        engine, trained = self.engine, self.engine._window.trained
        if engine._trains and (trained or engine.core.has_grads()):
            raise RuntimeError(
                f"{asked} in the middle of an accumulation window, after {max(1, trained)} of "
                f"{engine.gradient_accumulation_steps()} micro-batches, whose gradients count by the sizes of "
                "this window: call it after the engine.step() that updates the weights, before the next backward"
            )

    def start_window(self):
        """Starts a new accumulation window: what was accumulated is forgotten."""
        self.engine.zero_grad()
        self.engine._window.restart()
        self.engine.losses = None
        self.tell()

    def after_micro_step(self, boundary):
        self.tell()

    @property
    @member
    def micro_steps(self):
        """Micro-steps up to now, which are calls of ``step()``, in pipelines micro-batches."""
        return self.engine._window.micro_steps

    @micro_steps.setter
    def micro_steps(self, value):
        self.engine._window.micro_steps = value

    @member
    def is_gradient_accumulation_boundary(self):
        """True on the last micro step before the weights change."""
        return self.engine._window.at_boundary

    @member
    def set_gradient_accumulation_boundary(self, is_boundary):
        """Decides by hand whether the next backward and step are at a boundary, until it is called again."""
        assert self.engine.managed_gradient_accumulation(), (
            "set_gradient_accumulation_boundary has no meaning with managed_gradient_accumulation false: every step() "
            "is a boundary"
        )
        self.engine._window.set_boundary(is_boundary)

    @property
    @member
    def enable_backward_allreduce(self):
        """Whether backward reduces gradients at the accumulation boundary, as it does unless somebody sets this to
        False to call ``allreduce_gradients()`` later; the latest is ``step()``. At ZeRO stages 2 and 3, which keep no
        whole gradients, backward always reduces. It is False, too, before a step in which the ranks exchange signs
        instead (1-bit optimizers)."""
        exchanges = getattr(self.engine.stepping, "exchanges", None)
        keeps_own = exchanges is not None and exchanges.local
        return self.engine._window.reduces_in_backward and not keeps_own

    @enable_backward_allreduce.setter
    def enable_backward_allreduce(self, value):
        self.engine._window.reduces_in_backward = bool(value)

    @property
    @member
    def inside_no_sync_ctxt(self):
        """True inside ``with engine.no_sync()``."""
        return self.engine._window.no_sync

    @member
    @contextlib.contextmanager
    def no_sync(self):
        """Inside, backward only accumulates on this rank; the first backward outside, or step(), reduces all of it.

        At ZeRO stages 2 and 3 this rank then holds whole gradients, one element of the accumulation dtype for each
        parameter element, from the first backward inside until they are reduced.
        """
        window = self.engine._window
        assert not window.no_sync, "no_sync() is entered twice; leave the first context before"
        window.no_sync = True
        try:
            yield
        finally:
            window.no_sync = False

    @member
    @contextlib.contextmanager
    def coalesce_grad_reduction(self):
        """Several backwards inside are reduced once, when the context ends. step() comes after it.

        Costs what ``no_sync`` costs while the context is open.
        """
        engine = self.engine
        assert engine.managed_gradient_accumulation(), (
            "coalesce_grad_reduction has no meaning with managed_gradient_accumulation false: step() reduces what all "
            "backwards before it have left"
        )
        with engine.no_sync():
            yield
        if engine._stage_policy.reduces_each_micro_step or engine.is_gradient_accumulation_boundary():
            engine.allreduce_gradients()

    @member
    def allreduce_gradients(self, bucket_size=None):
        """Reduces now what backward has accumulated; engine.step() does so by itself."""
        if self.engine.core is not None:
            self.engine.core.finish_backward()
