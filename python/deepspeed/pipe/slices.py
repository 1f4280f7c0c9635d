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
        """Returns the tensors to send. First comes one entry for each tensor: None if it is sent whole, else an empty
        tensor with the shape ``(0, *shape of the whole tensor)``, of which only the shape travels. Then come the
        tensors, or this rank's parts of them."""
        if stream not in self.streams:
            return tensors
        shapes, parts = [], []
        for position, tensor in enumerate(tensors):
            cuts = tensor is not None and self._cuts((stream, peer, position), tensor)
            shapes.append(tensor.new_empty(0, *tensor.shape) if cuts else None)
            if cuts:
                flat = tensor.detach().reshape(self.size, -1)[self.rank]
                tensor = flat.requires_grad_(tensor.requires_grad)
            parts.append(tensor)
        return [*shapes, *parts]

    def join(self, stream, tensors):
        """The tensors that ``cut`` was given on the other stage."""
        if stream not in self.streams:
            return tensors
        count, found = len(tensors) // 2, []
        for shape, part in zip(tensors[:count], tensors[count:]):
            if shape is not None:
                whole = part.new_empty(self.size * part.numel())
                self.communicator.run("all_gather", part.detach(), whole).wait()
                part = whole.view(shape.shape[1:]).requires_grad_(part.requires_grad)
            found.append(part)
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
        same = (first == mine).all().to(torch.int64).reshape(1)
        self.communicator.run("all_reduce", output=same, op="min").wait()
        return same.item() == 1
