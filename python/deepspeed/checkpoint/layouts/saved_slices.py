"""A checkpoint of another number of tensor-parallel ranks: slices are put together and cut for this run."""

import collections
import functools

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.layouts.saved_state import Joined, Range
from deepspeed.checkpoint.layouts.saved_universal import ParallelRules, join_parts, local_slice, merge_slices


class Cut(collections.namedtuple("Cut", "shape dim parts", defaults=(None, 1))):
    """The form that a parameter has in this run's model. ``shape``: a torch.Size, on this rank; ``dim``: the dimension
    that tensor parallelism cuts (None: each rank has all of it; -1: it is cut, and was not said where), of ``parts``
    side by side."""

    @classmethod
    def of(cls, param, shape):
        """By the attributes that Megatron gives parameters."""
        if not (getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False)):
            return cls(shape)
        return cls(shape, getattr(param, "partition_dim", -1), max(getattr(param, "partition_stride", 1), 1))


class SavedSlices(Joined):
    """``states``: of each tensor-parallel rank that saved, by rank. ``cuts``: name -> ``Cut`` of this run's parameters,
    of which this is slice ``rank`` of ``count``. How slices make a whole is said by the ``universal_checkpoint_info``
    that was saved, else by the cuts."""

    def __init__(self, states, cuts, rank, count):
        super().__init__(states[:1], states[0].model)
        self.ranks = [one for state in states for one in state.ranks]
        self._slices, self._cuts, self._rank, self._count = states, cuts, rank, count
        self.shapes = {name: cuts[name].shape if name in cuts else shape for name, shape in self.shapes.items()}
        info = self.model.get(keys.UNIVERSAL_CHECKPOINT_INFO)
        self._rules = ParallelRules(info) if info else None
        self._held = (None, None)  # what was put together last

    def weight_shape(self, name):
        saved = self._states[0].weight_shape(name)
        return self._cuts[name].shape if name in self._cuts and saved is not None else saved

    def module(self):
        return {
            name: Range(functools.partial(self._own_slice, name, "weight"), shape=self._cuts[name].shape)
            if name in self._cuts
            else value
            for name, value in super().module().items()
        }

    def state_pieces(self, name, kind):
        return self._pieces(name, kind) if super().state_pieces(name, kind) else []

    def frozen_pieces(self, name):
        return self._pieces(name, "weight") if super().frozen_pieces(name) else []

    def _pieces(self, name, kind):
        numel = self._cuts[name].shape.numel()
        return [(0, numel, Range(functools.partial(self._own_slice, name, kind)))] if numel else []

    def _own_slice(self, name, kind):
        """This rank's part of ``kind`` of a parameter."""
        if self._held[0] != (name, kind):
            whole, hints = self._merged(name, [state.whole(name, kind) for state in self._slices])
            cut = local_slice(name, hints, whole, self._cuts[name].shape, self._rank, self._count, self.origin())
            self._held = (name, kind), cut.contiguous()
        return self._held[1]

    def _merged(self, name, slices):
        if self._rules is not None:
            return merge_slices(name, slices, self._rules)
        cut = self._cuts[name]
        if cut.dim is None:
            if any(not torch.equal(slices[0], other) for other in slices[1:]):
                raise ValueError(
                    f"{self.origin()}: parameter '{name}' differs among the {len(slices)} tensor-parallel ranks that "
                    f"saved it, and the model does not say that it is cut: set its attributes tensor_model_parallel "
                    f"and partition_dim, or save with '{keys.UNIVERSAL_CHECKPOINT_INFO}' in client_state"
                )
            return slices[0], {}
        if cut.dim < 0:
            raise ValueError(
                f"{self.origin()} was saved by {len(slices)} tensor-parallel ranks, this run has {self._count}, and "
                f"nobody says along which dimension parameter '{name}' is cut: set its attribute partition_dim, save "
                f"with '{keys.UNIVERSAL_CHECKPOINT_INFO}' in client_state, or load it with {len(slices)} ranks"
            )
        return join_parts(slices, cut.dim, cut.parts), {keys.CAT_DIM: cut.dim, keys.PARAM_N_SUB_PARAMS: cut.parts}
