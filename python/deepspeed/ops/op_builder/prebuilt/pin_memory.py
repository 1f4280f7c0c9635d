"""The op ``pin_memory``: page-locked memory of the host without a driver."""

from deepspeed.accelerator.native_pinning import pool

__all__ = ["pin_handle"]


class pin_handle:
    """Page-locked tensors. All handles, those of files too, share the pool of the process."""

    def new_cpu_locked_tensor(self, num_elem, example_tensor):
        """A page-locked tensor of ``num_elem`` elements with the dtype of ``example_tensor``.

        Raises:
            RuntimeError: the limit of locked memory (``ulimit -l``) is too low; the text names the bytes missing.
        """
        return pool().new_tensor(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor):
        """Unlocks it; its memory stays valid as long as a tensor uses it. False where it is of no pool."""
        return pool().release(tensor)

    def is_pinned(self, tensor):
        """Whether it, or the tensor it is a view of, is page-locked."""
        return pool().holds(tensor) or tensor.is_pinned()
