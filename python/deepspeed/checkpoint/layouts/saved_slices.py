"""A checkpoint of another number of tensor-parallel ranks: slices are put together and cut for this run."""

import functools

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.layouts.saved_state import Joined, Latest, Range
from deepspeed.checkpoint.layouts.saved_universal import Cut, ParallelRules, join_parts, merge_slices
from deepspeed.utils.tensor_slices import cut_of_table, join


class SavedSlices(Joined):
    """``states``: of each tensor-parallel rank that saved, by rank. ``cuts``: name -> ``Cut`` of this run's parameters,
    of which this is slice ``rank`` of ``count``; parameters without one are whole. The tables of cuts that were saved
    say how slices make a whole, else the ``universal_checkpoint_info`` that was saved, else the cuts."""

    def __init__(self, states, cuts, rank, count):
        super().__init__(states[:1], states[0].model)
        self.ranks = [one for state in states for one in state.ranks]
        self._slices, self._cuts, self._rank, self._count = states, cuts, rank, count
        tables, info = self.model.get(keys.TENSOR_CUTS), self.model.get(keys.UNIVERSAL_CHECKPOINT_INFO)
        self.is_whole = tables is not None
        self._joins = {name: (dim, cut_of_table(table)) for name, (dim, table) in (tables or {}).items()}
        self._rules = ParallelRules(info) if info and not self.is_whole else None
        self.shapes = {name: self._own_shape(name, shape) for name, shape in self.shapes.items()}
        self.frozen_shapes = {name: self._own_shape(name, shape) for name, shape in self.frozen_shapes.items()}
        self._put_together = Latest()

    def _whole_shape(self, name, saved):
        """The shape of a whole parameter, of which the first rank has saved ``saved``; None: not known from that."""
        if name in self._joins:
            dim, cut = self._joins[name]
            return torch.Size([*saved[:dim], cut.size(), *saved[dim + 1 :]])
        return saved if self.is_whole or len(self._slices) == 1 and self._rules is None else None

    def _own_shape(self, name, saved):
        return self._cuts[name].shape if name in self._cuts else self._whole_shape(name, saved) or saved

    def weight_shape(self, name):
        """The shape of this rank's part, or of the whole where that does not fit the model."""
        saved = self._states[0].weight_shape(name)
        if saved is None:
            return None
        own, whole = self._own_shape(name, saved), self._whole_shape(name, saved)
        wanted = self._cuts[name].whole if name in self._cuts else None
        return own if None in (whole, wanted) or whole == wanted else whole

    def module(self):
        found = super().module()
        for name in self._cuts.keys() | self._joins.keys():
            if name in found:
                shape = self._own_shape(name, torch.Size(found[name].shape))
                read = functools.partial(self._own_slice, name, "weight")
                found[name] = Range(read, shape=shape, dtype=found[name].dtype)
        return found

    def state_pieces(self, name, kind):
        return self._pieces(name, kind, self.shapes[name]) if super().state_pieces(name, kind) else []

    def frozen_pieces(self, name):
        return self._pieces(name, "weight", self.frozen_shapes[name]) if super().frozen_pieces(name) else []

    def _pieces(self, name, kind, shape):
        numel = shape.numel()
        return [(0, numel, Range(functools.partial(self._own_slice, name, kind)))] if numel else []

    def _own_slice(self, name, kind):
        """This rank's part of ``kind`` of a parameter."""
        return self._put_together.value((name, kind), lambda: self._cut_slice(name, kind))

    def _cut_slice(self, name, kind):
        own, hints = self._merged(name, [state.whole(name, kind) for state in self._slices])
        if name in self._cuts:
            own = self._cuts[name].take(name, hints, own, self._rank, self._count, self.origin())
        return own.contiguous()

    def _merged(self, name, slices):
        """``(whole tensor, hints)`` as of ``merge_slices``."""
        if self._rules is not None:
            return merge_slices(name, slices, self._rules)
        cut, whole = self._cuts.get(name) or Cut(None), slices[0]
        if name in self._joins:
            whole = join(slices, *self._joins[name])
        elif not self.is_whole and cut.dim is None and any(not torch.equal(whole, other) for other in slices[1:]):
            raise ValueError(
                f"{self.origin()}: parameter '{name}' differs among the {len(slices)} tensor-parallel ranks that "
                f"saved it, and the model does not say that it is cut: set its attributes tensor_model_parallel "
                f"and partition_dim, or save with '{keys.UNIVERSAL_CHECKPOINT_INFO}' in client_state"
            )
        if cut.dim is None:
            return whole, {}
        if cut.dim < 0:
            raise ValueError(
                f"{self.origin()} was saved by {len(slices)} tensor-parallel ranks, this run has {self._count}, and "
                f"nobody says along which dimension parameter '{name}' is cut: set its attribute partition_dim, save "
                f"with '{keys.UNIVERSAL_CHECKPOINT_INFO}' in client_state, or load it with {len(slices)} ranks"
            )
        if not self.is_whole and len(slices) > 1:
            whole = join_parts(slices, cut.dim, cut.parts)
        return whole, {keys.CAT_DIM: cut.dim, keys.PARAM_N_SUB_PARAMS: cut.parts}
