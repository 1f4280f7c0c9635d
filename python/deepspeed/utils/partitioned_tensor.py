"""A tensor of which every rank of a group holds a part."""

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.forwarding import answers_from
from deepspeed.utils.partition import partition_uniform


@answers_from({"data": "local_data", "local_size": "local_data.size()", "full_size": "orig_size"})
class TensorParts:
    """This rank's contiguous part of a flattened tensor, ``data()``, and what it takes to put the whole together again.

    tensor: the whole tensor, equal on all ranks of `group`; each keeps a copy of its part only.
    """

    def __init__(self, tensor, group):
        self.group = group
        self.num_parts = dist.get_world_size(group=group)
        self.rank = dist.get_rank(group=group)
        self.orig_size = list(tensor.size())
        self.orig_device = tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        begin, end = self.partition[self.rank], self.partition[self.rank + 1]
        self.local_data = tensor.detach().reshape(-1)[begin:end].clone()

    @classmethod
    def from_meta(cls, meta, local_part, group, device=None):
        """Built from what ``to_meta`` and ``data`` of a partitioned tensor gave, usually on another rank.

        device: where ``full()`` puts the whole tensor; default: the accelerator.
        """
        numbers = meta.tolist()
        dims = numbers[0]
        made = cls.__new__(cls)
        made.group = group
        made.orig_size = numbers[1 : 1 + dims]
        made.num_parts, made.rank = numbers[1 + dims : 3 + dims]
        made.partition = numbers[3 + dims :]
        made.orig_device = torch.device(device or get_accelerator().current_device_name())
        made.local_data = local_part.detach()
        if made.num_parts != dist.get_world_size(group=group) or made.rank != dist.get_rank(group=group):
            raise ValueError(
                f"this part is number {made.rank} of {made.num_parts}, but the group has "
                f"{dist.get_world_size(group=group)} ranks and this is number {dist.get_rank(group=group)}."
            )
        return made

    def to_meta(self):
        """int64 tensor: number of dimensions, the sizes, number of parts, this part, the offsets of the parts."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def full(self, device=None):
        """The whole tensor, gathered from the group; every rank must call it."""
        sizes = [end - begin for begin, end in zip(self.partition, self.partition[1:])]
        padded = self.local_data.new_zeros(max(sizes))
        padded[: self.local_data.numel()] = self.local_data
        gathered = [torch.empty_like(padded) for _ in range(self.num_parts)]
        dist.all_gather(gathered, padded, group=self.group)
        whole = torch.cat([part[:size] for part, size in zip(gathered, sizes)])
        return whole.reshape(self.orig_size).to(device or self.orig_device)
