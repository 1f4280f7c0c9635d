"""Weights that are cut over tensor-parallel ranks, put together from the files of all of them."""

import torch

from deepspeed.formats.weight_files import StoredWeight


class JoinedWeight(StoredWeight):
    """A weight of which each tensor-parallel rank has a slice; the whole one is in memory while it is read.

    slices: the ``StoredWeight`` of each rank. dim: the dimension that is cut. runs: for each rank ``[start, length]``
    of what it has of that dimension, in its order.
    """

    def __init__(self, slices, dim, runs):
        self.slices, self.dim, self.runs, self.pieces = slices, dim, runs, slices
        shape, self.dtype = list(slices[0].shape), slices[0].dtype
        shape[dim] = max((start + length for own in runs for start, length in own), default=0)
        self.shape = torch.Size(shape)

    def _parts(self):
        whole = torch.empty(self.shape, dtype=self.dtype)
        for one, own in reversed([*zip(self.slices, self.runs)]):  # of copies the first rank's counts
            values, at = one.contiguous(), 0
            for start, length in own:
                whole.narrow(self.dim, start, length).copy_(values.narrow(self.dim, at, length))
                at += length
        yield whole.view(-1)


def join_weights(found, tables, folder):
    """The weights of all model-parallel ranks as one dict; of what several have the first one's count. ``tables``: name
    -> ``[dim, runs]`` of what is cut over ranks. ValueError where ``folder`` lacks files of some rank."""
    whole, made = {}, {}
    for name, weight in ((name, weight) for own in found for name, weight in own.items()):
        slices = [own[name] for own in found if name in own] if name in tables else []  # those of one stage
        if slices and id(slices[0]) not in made:
            dim, runs = tables[name]
            if len(runs) != len(slices):
                raise ValueError(
                    f"'{folder}' has '{name}' of {len(slices)} model-parallel ranks, and {len(runs)} have saved it: "
                    "copy the files of all ranks into it"
                )
            made[id(slices[0])] = JoinedWeight(slices, dim, runs)
        whole.setdefault(name, made.get(id(weight), weight))
    return whole
