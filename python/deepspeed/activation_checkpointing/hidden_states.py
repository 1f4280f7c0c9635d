"""Keeps marked hidden states in host memory or in files until their backward."""

import functools
import inspect
import weakref

import torch

from deepspeed.activation_checkpointing.offload import _ActivationOffloadEngine
from deepspeed.utils.waiting_tensors import BackwardOrder, Waiting, store_of


class _Saved:
    """A tensor that autograd saved: on the device, on the host, or both for a moment."""

    __slots__ = ("__weakref__", "device", "host", "tensor", "version")

    def __init__(self, tensor):
        self.tensor = tensor
        self.device = tensor.device
        self.host = None
        self.version = tensor._version

    def check(self):
        # Autograd makes this check itself only for tensors without hooks.
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a hidden state of shape {list(self.tensor.shape)} that is needed for backward has been modified by "
                f"an inplace operation: write the result to a new tensor instead."
            )


class CheckpointHiddenStatesOffload(_ActivationOffloadEngine, torch.autograd.graph.saved_tensors_hooks):
    """A context in which tensors that were given to ``mark`` and that autograd saves are moved to the host; backward
    gets them back one ahead of its need. Unmarked tensors are saved as usual.

    It fits around any checkpointing that saves the inputs of its segments through autograd: mark the hidden states
    that go from layer to layer. The segments of ``deepspeed.checkpointing`` mark theirs by themselves. Arguments: see
    the base class. ``folder``: they wait in files there, written and read beside the computation. Without it nothing
    moves with the CPU as accelerator, since everything is on the host.
    """

    @functools.wraps(_ActivationOffloadEngine.__init__)
    def __init__(self, *args, folder=None, **kwargs):
        _ActivationOffloadEngine.__init__(self, *args, **kwargs)
        self.folder = folder
        torch.autograd.graph.saved_tensors_hooks.__init__(self, self._pack, self._unpack)
        self._marked = {}
        self._order = BackwardOrder(self.keep_last_count)

    def mark(self, tensor):
        """``tensor`` is moved when autograd saves it; returns it."""
        self._marked[_identity(tensor)] = weakref.ref(tensor)
        return tensor

    def reset(self):
        """Drops the marks of this step; saved tensors stay usable."""
        self._marked.clear()
        self._order = BackwardOrder(self.keep_last_count)
        super().reset()

    def __enter__(self):
        torch.autograd.graph.saved_tensors_hooks.__enter__(self)
        _active.append(self)
        return self

    def __exit__(self, *args, **kwargs):
        _active.remove(self)
        self._marked.clear()
        self._order.latest.clear()  # these stay on the device
        return torch.autograd.graph.saved_tensors_hooks.__exit__(self, *args, **kwargs)

    def wants(self, tensor):
        """Whether this tensor, which autograd saves, was marked. Autograd passes an alias, so the tensor is identified
        by its address. A mark whose tensor died may name another one by now; moving that one is harmless."""
        return _identity(tensor) in self._marked

    # ---- where they wait ---------------------------------------------------------------------------------------------
    def worth_moving(self, tensor):
        if self.folder is None:
            return super().worth_moving(tensor)
        return tensor.numel() * tensor.element_size() >= self.min_offload_bytes

    def to_host(self, tensor, host=None):
        if self.folder is None:
            return super().to_host(tensor, host)
        return Waiting(store_of(tensor.device, self.folder), tensor.detach())

    def to_device(self, host, device):
        return host.get() if isinstance(host, Waiting) else super().to_device(host, device)

    def _start_next_back(self, current=None):
        saved = self._order.next_back(current)
        if saved is not None and isinstance(saved.host, Waiting):
            saved.host.prefetch()
        elif saved is not None and self.use_streams and saved.tensor is None:
            saved.tensor = self.to_device(saved.host, saved.device)

    # ---- what autograd calls -----------------------------------------------------------------------------------------
    def _pack(self, tensor):
        if not self.wants(tensor) or not self.worth_moving(tensor):
            return tensor
        saved = _Saved(tensor)
        for oldest in self._order.add(saved):
            oldest.check()
            oldest.host = self.to_host(oldest.tensor)
            oldest.tensor = None
        return saved

    def _unpack(self, saved):
        if not isinstance(saved, _Saved):
            return saved
        if saved.host is None:
            saved.check()
            self._start_next_back()
            return saved.tensor
        tensor = self.to_device(saved.host, saved.device) if saved.tensor is None else saved.tensor
        saved.tensor = None  # a second backward fetches it again
        self._start_next_back(saved)
        return tensor


def _identity(tensor):
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


_active = []


def mark_active(tensors):
    """Marks ``tensors`` for the contexts that are open."""
    for context in _active:
        for tensor in tensors:
            context.mark(tensor)


def get_checkpoint_hidden_states_offloading_ctx_manager(*args, **kwargs):
    """A new ``CheckpointHiddenStatesOffload``."""
    return CheckpointHiddenStatesOffload(*args, **kwargs)


get_checkpoint_hidden_states_offloading_ctx_manager.__signature__ = inspect.signature(CheckpointHiddenStatesOffload)
