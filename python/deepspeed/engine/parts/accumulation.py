"""Which backward of an engine reduces gradients: accumulation boundaries, ``no_sync``, reductions by hand."""

import contextlib

from deepspeed.engine.members import Part, engine_parts, member


@engine_parts.add("_accumulation")
class Accumulation(Part):
    """A part of the engine. Tells the core in advance what a backward that the user runs is to do."""

    boundary = None  # as set by hand; None: counted
    last_micro_batches = 1  # of the last step
    in_no_sync = False
    in_backward = True
    told = None  # the plan that the core has
    user_scaled = False  # engine.scale was called: the user's backward has the loss scale already

    def reduces_now(self):
        """Whether the next backward adds up over the ranks: at a boundary, or always where gradients are sharded."""
        engine = self.engine
        if self.in_no_sync:
            return False
        if engine._stage_policy.reduces_each_micro_step:
            return True
        return (
            engine.managed_gradient_accumulation() and self.in_backward and engine.is_gradient_accumulation_boundary()
        )

    def in_window(self):
        """Micro-batches that have been trained on since the last step at a boundary."""
        return max(self.engine._steps.micro_steps, self.engine._backward.micro_batches)

    def micro_batches(self):
        """Micro-batches of the step under way, which is at a boundary. Calls of ``step`` count them; where each of
        these is a boundary, forwards that a backward has reached do. Ranks are assumed to have equally many."""
        if hasattr(self.engine, "train_batch"):
            return self.engine.gradient_accumulation_steps()
        if self.engine.managed_gradient_accumulation():
            return self.engine._steps.micro_steps + 1
        return max(1, self.engine._backward.micro_batches)

    def need_no_window(self, asked):
        """RuntimeError if an accumulation window has begun: its gradients were divided by the sizes up to now."""
        if self.engine._trains and (self.in_window() or self.engine.core.has_grads()):
            raise RuntimeError(
                f"{asked} in the middle of an accumulation window, after {max(1, self.in_window())} of "
                f"{self.engine.gradient_accumulation_steps()} micro-batches, whose gradients count by the sizes of "
                "this window: call it after the engine.step() that updates the weights, before the next backward"
            )

    def start_window(self):
        """A new accumulation window: what was accumulated is forgotten."""
        engine = self.engine
        engine.zero_grad()
        engine.micro_steps -= engine._steps.micro_steps
        engine._steps.micro_steps = 0
        engine._backward.start_window()
        engine.losses, self.user_scaled = None, False
        self.replan()

    def start(self):
        self.replan()

    def after_micro_step(self, boundary):
        self.user_scaled = False
        self.replan()

    def user_plan(self):
        """Whether the next backward of the user is reduced, the loss scale that it lacks, and the other factor of its
        gradients."""
        scale = 1.0 if self.user_scaled else self.engine.stepping.loss_scale
        return self.reduces_now(), scale, self.engine._dynamic.weight() / self.engine.gradient_accumulation_steps()

    def replan(self):
        """Tells the core, unless it knows from the last forward or call of this."""
        if self.engine._trains and (plan := self.user_plan()) != self.told:
            self.told = plan
            self.engine.core.plan_user_backward(*plan)

    @member
    def is_gradient_accumulation_boundary(self):
        """True on the last micro step before the weights change."""
        if self.boundary is not None:
            return self.boundary
        return self.engine._steps.micro_steps + 1 >= self.engine.gradient_accumulation_steps()

    @member
    def set_gradient_accumulation_boundary(self, is_boundary):
        """Decides by hand whether the next backward and step are at a boundary, until it is called again."""
        assert self.engine.managed_gradient_accumulation(), (
            "set_gradient_accumulation_boundary has no meaning with managed_gradient_accumulation false: every step() "
            "is a boundary"
        )
        self.boundary = is_boundary
        self.replan()

    @property
    @member
    def enable_backward_allreduce(self):
        """Whether backward reduces gradients at the accumulation boundary, as it does unless somebody sets this to
        False to call ``allreduce_gradients()`` later; the latest is ``step()``. At ZeRO stages 2 and 3, which keep no
        whole gradients, backward always reduces."""
        return self.in_backward

    @enable_backward_allreduce.setter
    def enable_backward_allreduce(self, value):
        self.in_backward = bool(value)
        self.replan()

    @property
    @member
    def inside_no_sync_ctxt(self):
        """True inside ``with engine.no_sync()``."""
        return self.in_no_sync

    @member
    @contextlib.contextmanager
    def no_sync(self):
        """Inside, backward only accumulates on this rank; the first backward outside, or step(), reduces all of it.

        At ZeRO stages 2 and 3 this rank then holds whole gradients, one element of the accumulation dtype for each
        parameter element, from the first backward inside until they are reduced.
        """
        assert not self.in_no_sync, "no_sync() is entered twice; leave the first context before"
        self.in_no_sync = True
        self.replan()
        try:
            yield
        finally:
            self.in_no_sync = False
            self.replan()

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
