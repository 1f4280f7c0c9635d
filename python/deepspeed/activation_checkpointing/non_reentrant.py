"""The checkpoint without a backward inside: the segment's own graph stays, and saved tensors are computed again when
the first of its nodes needs one."""

import weakref

import torch

from deepspeed.activation_checkpointing.keep import bring_back, keep
from deepspeed.activation_checkpointing.tensors import extract_tensors, merge_tensors


class _KeptInputs(torch.autograd.Function):
    """A node that is never run: it lets autograd hold a segment's inputs, so that an outer segment's hooks see them."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("the node that holds a segment's inputs is not part of any graph")


class _Holder:
    """A placeholder that the graph keeps instead of a saved tensor."""

    __slots__ = ("__weakref__",)


class _EnoughError(Exception):
    """Ends a recomputation that has computed all required tensors."""


class _Frame:
    """One segment: the holders in its graph, in order, and the recomputed tensors of those that are still alive."""

    def __init__(self, call):
        self.call = call
        kept, self.others, self.flags = extract_tensors(keep(call.tensors))
        with torch.enable_grad():
            self.end = _KeptInputs.apply(torch.empty(0, requires_grad=True), *kept)  # keeps its node alive
        self.wanted = [tensor.requires_grad for tensor in call.tensors]
        self.holders = []
        self.facts = []  # shape, dtype and device of the tensor of each holder
        self.again = weakref.WeakKeyDictionary()
        self.complete = False  # forward has returned

    def pack(self, tensor):
        holder = _Holder()
        self.holders.append(weakref.ref(holder))
        self.facts.append(_facts(tensor))
        return holder

    def unpack(self, holder):
        if holder not in self.again:
            self.recompute()
        if self.call.options.keep_recomputed:  # until the graph releases the holder
            return self.again[holder]
        # Once per use; a second backward over the graph (retain_graph) computes the segment once more.
        return self.again.pop(holder)

    def recompute(self):
        saved = []
        # A function that runs a backward of its own needs tensors before it has returned. Only tensors that the graph
        # has saved until then are computed again.
        stop_at = None if self.complete else len(self.holders)

        def keep_again(tensor):
            number = len(saved)
            saved.append(_facts(tensor))
            holder = self.holders[number]() if number < len(self.holders) else None
            if holder is not None:
                self.again[holder] = tensor.detach()
            if len(saved) == stop_at:
                raise _EnoughError
            return tensor.detach()  # read by backwards inside of the function only: this graph is dropped below

        inputs = bring_back(merge_tensors(self.end.grad_fn.saved_tensors, self.others, self.flags))
        detached = [one.detach().requires_grad_(wanted) for one, wanted in zip(inputs, self.wanted)]
        with torch.autograd.graph.saved_tensors_hooks(keep_again, lambda tensor: tensor):
            try:
                self.call.again(detached)
            except Exception:
                if len(saved) != stop_at:  # by count, not by type: torch 1.13 replaces errors of hooks by its own
                    raise
        if len(saved) != len(self.holders):
            self._differs(f"it saved {len(self.holders)} tensors for backward in forward and {len(saved)} now")
        if self.call.options.check:
            for number, (before, now) in enumerate(zip(self.facts, saved)):
                if before != now:
                    self._differs(f"saved tensor {number} was {_shown(before)} in forward and is {_shown(now)} now")

    def _differs(self, what):
        self.again.clear()
        raise RuntimeError(
            f"the checkpointed {self.call.name} did not do the same when it ran again for backward: {what}. It must "
            f"not depend on anything that changes in between (global counters, training mode, its own side effects)."
        )


def _facts(tensor):
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _shown(facts):
    return f"{facts[1]} {list(facts[0])} on {facts[2]}"


def run(call):
    """The outputs of ``call``, from a graph that holds the segment's inputs only."""
    frame = _Frame(call)
    with torch.autograd.graph.saved_tensors_hooks(frame.pack, frame.unpack):
        outputs = call.first()
    frame.complete = True
    return outputs
