"""The operations (flops) of each step on this rank, for the share of the peak that a step reaches.

Counting slows a pass down, so each kind of pass is counted once: a forward by the shapes of its inputs and by what
drops tokens and layers, a backward by the forwards before it. Later passes of the kind take that number. Behind
``MOST`` kinds a new one takes the number of the kind whose inputs have the nearest number of elements, in proportion.
"""

import contextlib

import torch

from deepspeed.engine.members import Part, engine_parts
from deepspeed.registry import load_target
from deepspeed.zero.nested import tensors_within

MOST = 64


@engine_parts.add("_operations")
class Operations(Part):
    """A part of the engine. It counts where a report asks for it: with ``step_log.file``, with ``peak_tflops``, or in
    an experiment of the tuner."""

    of_step = None  # of the last step; None where a pass was not counted, as in the first step, which makes buffers
    _wanted = False
    _key = _counted = None  # of the pass under way: its kind, and its operations

    def __init__(self, engine):
        super().__init__(engine)
        self._costs = {}  # kind of a pass -> operations
        self._passes = {}  # in a pipeline: (part, number of the micro-batch) -> kind of its forward
        self._forget()

    def start(self):
        engine, section = self.engine, self.engine._config.step_log_config
        self._wanted = section.enabled and (section.file is not None or section.peak_tflops is not None)
        self._wanted = self._wanted or engine._autotuning.counts_flops

    def _forget(self):
        self._forwards, self._since = {}, []  # of this micro-step, by their numbers; and kinds since the last backward
        self._backwards = 0
        self._total = 0  # of the step up to now; None: not known

    # ---- the kind of a pass ------------------------------------------------------------------------------------------
    def see_inputs(self, inputs, kwargs):
        if self._wanted:
            self._key = self._kind((inputs, kwargs))

    def see_pass(self, part, number, what, inputs=None):
        """Before a pass of a pipeline's micro-batch; with ``inputs`` it is the forward."""
        if not self._wanted:
            return
        if inputs is not None:
            self._passes[part, number] = part, self._kind(inputs)
        self._key = what, self._passes.get((part, number))

    def _kind(self, inputs):
        engine = self.engine
        shapes = tuple((tuple(one.shape), one.dtype) for one in tensors_within(inputs))
        kept = engine.random_ltd_scheduler and engine.random_ltd_scheduler.get_value(engine.global_steps)
        return shapes, engine.module.training, kept, len(engine._layer_dropping.dropped())

    # ---- passes ------------------------------------------------------------------------------------------------------
    def around(self, phase):
        if not self._wanted or (phase == "forward" and not torch.is_grad_enabled()):
            return None
        return self._pass(phase)

    @contextlib.contextmanager
    def _pass(self, phase):
        pipelined = hasattr(self.engine, "train_batch")
        kind = phase, tuple(self._since) if phase == "backward" and not pipelined else self._key
        cost = self._known(kind)
        if cost is not None or self.engine.gas_boundary_ctr == 0:
            yield
        else:
            with load_target("deepspeed.profiling.op_costs:CountedOps")() as counted:
                yield
            cost = self._costs[kind] = counted.flops
        if pipelined:
            self._add(cost)
        elif phase == "forward":
            self._counted = cost
        else:
            self._since = []
            self._backwards = None if None in (self._backwards, cost) else self._backwards + cost

    def _known(self, kind):
        found = self._costs.get(kind)
        if found is not None or len(self._costs) < MOST:
            return found
        alike = [known for known in self._costs if known[0] == kind[0]]
        if not alike:
            return None
        wanted = _elements(kind)
        nearest = min(alike, key=lambda known: abs(_elements(known) - wanted))
        return round(self._costs[nearest] * wanted / max(1, _elements(nearest)))

    def forwarded(self, number):
        if self._wanted:
            self._forwards[number] = self._counted
            self._since.append(self._key)

    def _add(self, cost):
        self._total = None if None in (self._total, cost) else self._total + cost

    # ---- a step ------------------------------------------------------------------------------------------------------
    def before_micro_step(self, boundary):
        if not self._wanted or hasattr(self.engine, "train_batch"):
            return
        trained = self.engine._backward.counted(self._forwards)
        known = None if None in trained else sum(trained)
        self._add(known)
        # A backward of the script is not seen: as is usual, it has twice the operations of its forward.
        self._add(self._backwards if self.engine._window.has_own_backward or known is None else 2 * known)
        self._forwards, self._since, self._backwards = {}, [], 0

    def after_step(self):
        self.of_step = self._total or None
        self._passes = {}
        self._forget()

    def failed_step(self):
        self._forget()


def _elements(kind):
    """The number of elements of all shapes in a kind of pass."""
    if isinstance(kind, torch.dtype) or not isinstance(kind, tuple):
        return 0
    if kind and isinstance(kind[0], tuple) and len(kind) == 2 and isinstance(kind[1], torch.dtype):
        return torch.Size(kind[0]).numel()
    return sum(map(_elements, kind))
