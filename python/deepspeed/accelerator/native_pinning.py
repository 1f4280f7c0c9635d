"""Page-locked host memory without a driver: what ``DS_PIN_MEMORY_BACKEND=native`` chooses."""

import os

from deepspeed.registry import load_target


def pool():
    """The page-locked memory of this process: handles of files share it. Needs the native module."""
    return load_target("deepspeed._native:_C").aio.pool


class NativePinnedMemory:
    """Page-locked copies of tensors, by ``mlock``. All objects, ``aio_handle`` and ``pin_handle`` share one pool."""

    def pin(self, tensor, make_copy=True, match_shape=True):
        """A page-locked tensor with the dtype and number of elements of ``tensor``, which is on the host.

        make_copy: with its content; else content is undefined. match_shape: with its shape; else one-dimensional.

        Raises:
            RuntimeError: the limit of locked memory (``ulimit -l``) is too low; the text names the bytes missing.
        """
        pinned = pool().new_tensor(tensor.numel(), tensor.dtype)
        if make_copy:
            pinned.copy_(tensor.detach().reshape(-1))
        return pinned.view(tensor.shape) if match_shape else pinned

    def is_pinned(self, tensor):
        """Whether it, or the tensor it is a view of, was made by ``pin`` or a handle, and not unpinned since."""
        return pool().holds(tensor)

    def unpin(self, tensor):
        """Unlocks its memory, which stays valid as long as a tensor uses it. False where it is of no pool."""
        return pool().release(tensor)


def get_active_native_pinned_memory():
    """A ``NativePinnedMemory`` where the environment variable DS_PIN_MEMORY_BACKEND is ``native``, else None.

    Raises:
        ValueError: the variable is neither ``native`` nor ``torch``.
    """
    backend = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch")
    if backend not in ("torch", "native"):
        raise ValueError(
            f"the environment variable DS_PIN_MEMORY_BACKEND is {backend!r}, but memory is pinned through 'torch' or "
            f"'native' only: unset the variable or set it to one of them."
        )
    return NativePinnedMemory() if backend == "native" else None
