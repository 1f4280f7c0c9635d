"""``engine.plan()``: the forecast of this engine's steps."""

import torch

from deepspeed.engine.members import Part, engine_parts, member
from deepspeed.registry import load_target
from deepspeed.zero.nested import replace


def _shape_of(tensor):
    """One element, so that a planned step does not count it as a copy."""
    return torch.empty((), dtype=tensor.dtype, device="meta").expand(tensor.shape)


@engine_parts.add("_planning")
class Planning(Part):
    """A part of the engine. ``inputs``: of the first forward that trained, without values."""

    inputs = None

    def see_inputs(self, inputs, kwargs):
        self.inputs = replace((inputs, kwargs), torch.is_tensor, _shape_of)
        hooks = self.engine._hooks  # once is enough
        hooks["see_inputs"] = [part for part in hooks["see_inputs"] if part is not self]

    @member
    def plan(self, memory=None, sample=None, machine=None):
        """The ``deepspeed.planner.Plan`` of this rank, or of all stages of its pipeline: memory by owner, traffic and
        time of a step. Nothing is trained: a forked process runs steps of another engine on tensors without memory.

        memory: bytes of a device, or a text such as ``"80GB"``; None: no limit. sample: the inputs of a micro-batch, as
        in ``deepspeed.plan``; None: those of the first forward, or batch, that trained. machine: a machine file.
        """
        inputs = self.inputs if sample is None else sample
        if inputs is None:
            raise ValueError("engine.plan() does not know the inputs yet: pass sample=, or call it after a forward")
        return load_target("deepspeed.planner.plans:plan_of_engine")(self.engine, inputs, memory, machine)
