"""The memory that the passes of a part of a pipeline need for one micro-batch: forward and backward run on meta
tensors, and what would be allocated is counted until it is released."""

import contextlib
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepspeed._native import _C
from deepspeed.activation_checkpointing import checkpointing
from deepspeed.pipe.profile import tensors_of
from deepspeed.pipe.recompute import segments
from deepspeed.zero.nested import replace


@dataclass(frozen=True)
class PartMemory:
    """Bytes, without weights and their gradients."""

    kept: int  # from the forward to the backward: inputs, outputs, and what the graph holds
    between: int  # between the two halves of a backward
    passes: tuple  # the most while a forward, a backward, its first and its second half run, with what is kept


@contextlib.contextmanager
def counting(memory):
    """A context in which new meta tensors count in ``memory``."""
    memory.install()
    try:
        yield
    finally:
        memory.remove()


class _Facts(NamedTuple):
    shape: tuple
    dtype: torch.dtype
    wants_grad: bool


def facts_of(value):
    """Shapes and types of what passes between parts; other things as they are."""
    return replace(value, torch.is_tensor, lambda one: _Facts(tuple(one.shape), one.dtype, one.requires_grad))


def _made(facts):
    def made(one):
        return torch.empty(one.shape, dtype=one.dtype, device="meta").requires_grad_(one.wants_grad)

    return replace(facts, lambda one: isinstance(one, _Facts), made)


class _Part:
    """``calls``: what runs each layer, and its module or None. loss: a function of the outputs and of the labels with
    the facts of these; None where there is none, or it is not known."""

    def __init__(self, calls, interval, names, loss=None):
        self.loss = loss
        self.runs, modules = [run for run, _ in calls], [module for _, module in calls if module is not None]
        self.segments = list(segments(self.runs, interval, names))
        self.weights = [one for module in modules for one in (*module.parameters(), *module.buffers())]
        self._nodes = [self._without_grad(one) for one in self.weights if one.requires_grad]  # alive, with their hooks

    @staticmethod
    def _without_grad(weight):
        """The core takes gradients when they come."""
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]

        def taken(*_):
            weight.grad = None

        node.register_hook(taken)
        return node

    def _run(self, begin, end, packed):
        def segment(*inputs):
            x = inputs if packed else inputs[0]
            for run in self.runs[begin:end]:
                x = run(x)
            return x

        return segment

    def forward(self, x, checkpoint):
        for begin, end, again in self.segments:
            packed = isinstance(x, tuple)
            segment, inputs = self._run(begin, end, packed), x if packed else (x,)
            x = checkpoint(segment, *inputs) if again else segment(*inputs)
        return x

    def ended(self, out):
        """The tensors that the backward begins with, and those that are held besides."""
        if self.loss is None:
            return out, ()
        labels = _made(self.loss[1])
        return self.loss[0](out, labels), (out, labels)


def _passes(part, facts, split):
    """The outputs, and bytes: kept, the most in the forward, in the (first) backward, between both, in the second.
    split: None: no backward."""
    memory = _C.MetaMemory()  # of what is made from now on: not of weights
    with torch.enable_grad(), counting(memory):
        x = _made(facts)
        memory.reset_peak()
        checkpoint = checkpointing.split_checkpoint if split else checkpointing.non_reentrant_checkpoint
        out = part.forward(x, checkpoint)
        following = facts_of(out)
        out, besides = part.ended(out)
        kept, forward = memory.live, memory.peak
        memory.reset_peak()
        heads = [one for one in tensors_of(out) if one.requires_grad]
        if split is None or not heads:
            return following, kept, forward, kept, 0, 0
        grads = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in heads]
        if not split:
            torch.autograd.backward(heads, grads)
            return following, kept, forward, memory.peak, 0, 0
        halves = _C.SplitBackward(heads, grads, [one for one in tensors_of(x) if one.requires_grad])
        halves.run_inputs()
        first = memory.peak
        del x, out, besides, heads, grads
        between = memory.live
        memory.reset_peak()
        halves.run_weights()
        return following, kept, forward, first, between, memory.peak


def part_memories(calls, bounds, sample, interval=0, names=None, split=True, loss=None):
    """``PartMemory`` of each part of the layers ``calls`` (``on_meta_call``), for the inputs ``sample``; and what is
    not known, in words, or "".

    interval, names: ``activation_checkpoint_interval`` and ``checkpointable_layers``. split: whether a backward in
    halves is one; False: its first half does everything. loss: of the last part: a function of outputs and labels, and
    labels.
    """
    facts, found, note = facts_of(sample), [], ""
    for begin, end in zip(bounds, bounds[1:]):
        part = _Part(calls[begin:end], interval, names)
        if loss is not None and end == bounds[-1]:
            part.loss = (loss[0], facts_of(loss[1]))
        try:
            following, kept, forward, *_ = _passes(part, facts, None)
        except Exception as error:  # the layers have run before
            part.loss, note = None, f"the loss does not run on meta tensors, so its memory is not known: {error}"
            following, kept, forward, *_ = _passes(part, facts, None)
        backward = first = kept
        between = second = 0
        try:
            *_, backward, _, _ = _passes(part, facts, False)
            *_, first, between, second = _passes(part, facts, True) if split else (backward, 0, 0)
        except Exception as error:  # a function of the user's whose backward wants values
            note = f"layers {begin} to {end - 1} cannot run backward on meta tensors, so its peak is not known: {error}"
        found.append(PartMemory(kept, between, (forward, backward, first, second)))
        facts = following
    return found, note
