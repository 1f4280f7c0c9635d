"""Messages between stages whose layers are sliced over ranks: each slice sends its part of a tensor that all have."""

import torch

from deepspeed.log import warning_once

ACTIVATIONS, GRADS = False, True  # the two streams of messages between two stages
SMALLEST = 4096  # bytes: below, the gather costs more than the transfer


class Slices:
    """``pipeline.pipe_partitioned``, ``grad_partitioned``: tensors that are equal on all slice ranks travel in parts,
    one from each, and are gathered where they arrive. Whether they are is looked at when a position in the messages of
    a stream has a tensor for the first time; tensors that differ, or do not divide, travel whole.

    communicator: of the slice ranks. streams: those that are cut.
    """

    def __init__(self, communicator, streams):
        self.communicator, self.streams = communicator, streams
        self.size, self.rank = communicator.size, communicator.rank
        self.equal = {}  # (stream, peer, position) -> whether its tensors are

    def cut(self, stream, peer, tensors):
        """The tensors to send: first one that says how the others were cut, and into which shapes they grow again."""
        if stream not in self.streams:
            return tensors
        plan, parts = [], []
        for position, tensor in enumerate(tensors):
            if tensor is None or not self._cuts((stream, peer, position), tensor):
                plan.append([])
                parts.append(tensor)
                continue
            plan.append(list(tensor.shape))
            flat = tensor.detach().reshape(-1)
            width = flat.numel() // self.size
            part = flat[self.rank * width : (self.rank + 1) * width]
            parts.append(part.requires_grad_(tensor.requires_grad))
        facts = [number for shape in plan for number in (len(shape), *shape)]
        return [torch.tensor(facts, dtype=torch.int64), *parts]

    def join(self, stream, tensors):
        """The tensors that ``cut`` was given on the other stage."""
        if stream not in self.streams:
            return tensors
        facts, found = iter(tensors[0].tolist()), []
        for part in tensors[1:]:
            shape = [next(facts) for _ in range(next(facts))]
            if not shape:
                found.append(part)
                continue
            whole = part.new_empty(self.size * part.numel())
            self.communicator.run("all_gather", part.detach(), whole).wait()
            found.append(whole.view(shape).requires_grad_(part.requires_grad))
        return found

    def _cuts(self, position, tensor):
        if tensor.dim() == 0 or tensor.numel() % self.size or tensor.numel() * tensor.element_size() < SMALLEST:
            return False
        if position not in self.equal:
            self.equal[position] = self._is_equal(tensor)
            if not self.equal[position]:
                warning_once(
                    "tensors between pipeline stages differ on the ranks that share a layer, so they travel whole: "
                    "pipeline.pipe_partitioned and grad_partitioned have no effect on them. This is said once.",
                    key="slices that differ",
                )
        return self.equal[position]

    def _is_equal(self, tensor):
        """Whether all slice ranks have the same bytes."""
        mine = tensor.detach().contiguous().view(-1).view(torch.uint8).clone()
        first = mine.clone()
        self.communicator.run("broadcast", output=first, peer=0).wait()
        differs = torch.tensor([int(not torch.equal(first, mine))], dtype=torch.int64, device=tensor.device)
        self.communicator.run("all_reduce", output=differs, op="max").wait()
        return differs.item() == 0
