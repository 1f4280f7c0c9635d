"""One call of an op for lists of tensors, as apex has it."""


class MultiTensorApply:
    """Calls an op with a chunk size, which ops for GPUs split tensors by.

    Args:
        chunk_size: elements of a chunk.
    """

    def __init__(self, chunk_size):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        """Returns ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
