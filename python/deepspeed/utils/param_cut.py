"""The slice of a parameter that a rank has where ranks share layers: the mark that ``deepspeed.module_inject`` leaves
on parameters, for checkpoints and norms."""

import dataclasses

import torch

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.comm import mesh_views
from deepspeed.utils import tensor_slices


@dataclasses.dataclass(frozen=True)
class ParamCut:
    """The slice of a parameter that a rank has. ``dim``: the dimension that ``cut``, a native ``TensorCut``, cuts; with
    None every rank has the whole. ``partial``: each rank sees a part of its gradient, which is summed over them."""

    dim: int
    cut: object
    group: object
    rank: int
    partial: bool = False

    @property
    def ranks(self):
        return self.cut.ranks() if self.cut is not None else dist.get_world_size(self.group)

    def whole_shape(self, shape):
        """The shape of the whole parameter, where this rank's part has ``shape``."""
        if self.dim is None:
            return torch.Size(shape)
        return torch.Size([*shape[: self.dim], self.cut.size(), *shape[self.dim + 1 :]])

    def table(self):
        """``[dim, runs of every rank]`` in plain lists, for checkpoints; None where every rank has the whole."""
        return None if self.dim is None else [self.dim, tensor_slices.table_of(self.cut)]

    def own(self, whole):
        """This rank's slice of the whole tensor, in memory of its own."""
        return whole if self.dim is None else tensor_slices.narrow(whole, self.dim, self.cut, self.rank)

    def join(self, own):
        """The whole tensor on every rank of the group, from the slices of all of them. Every rank calls it."""
        if self.dim is None:
            return own
        return join_over(self.group, self.cut, own.detach().contiguous(), self.dim)


def join_over(group, cut, own, dim):
    """The whole tensor, on every rank of torch's ``group``, of the ranks' slices along ``dim``, with gradients. Every
    rank calls it with its slice ``own``."""
    sizes = [cut.width(rank) for rank in range(cut.ranks())]
    slices = _C.gather_widths(mesh_views.tensor_ranks(group), own, dim, sizes)
    return tensor_slices.join(slices.split(sizes, dim), dim, cut)


def cut_of(param):
    """The ``ParamCut`` of a parameter; None: no layer is cut that it belongs to."""
    return getattr(param, "ds_param_cut", None)
