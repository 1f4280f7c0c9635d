"""The published constructor of a tensor of which every rank of a group holds a part."""

from deepspeed.utils.partitioned_tensor import TensorParts


class PartitionedTensor(TensorParts):
    """This rank's contiguous part of a flattened tensor, and what it takes to put the whole together again.

    tensor: the whole tensor, equal on all ranks of `group`; each keeps a copy of its part only. ``partition_meta`` is
    accepted for older callers.
    """

    def __init__(self, tensor, group, partition_meta=None):
        super().__init__(tensor, group)
