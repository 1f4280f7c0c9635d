"""Contiguous buffers for the saved activations of all layers, so that they do not fragment the remaining memory."""

import torch

from deepspeed.accelerator import get_accelerator


class ContiguousBuffers:
    """Hands out slots of buffers that hold ``slots`` activations of one size each.

    A buffer lives as long as a tensor in it does, so a tensor in use is never overwritten: when the slots
    are used up, or the next forward begins after a backward (``close``), a new buffer is opened.
    """

    def __init__(self, slots):
        self.slots = slots
        self._open = {}

    def slot(self, index, numel, dtype, device, pin=False):
        """An uninitialised 1-D tensor of ``numel`` elements. ``index``: number of the activation in its segment."""
        key = (index, numel, dtype, device)
        buffer, used = self._open.pop(key, (None, 0))
        if buffer is None:
            buffer = torch.empty(self.slots * numel, dtype=dtype, device=device)
            if pin:
                buffer = get_accelerator().pin_memory(buffer, make_copy=False)
        if used + 1 < self.slots:
            self._open[key] = (buffer, used + 1)
        # Through .data: a slot has a version counter of its own, so that filling the next one does not look to
        # autograd like a change of this one.
        return buffer.data.narrow(0, used * numel, numel)

    def close(self):
        """Makes later slots come from new buffers."""
        self._open.clear()
