"""The layout of ZeRO stage 3: every parameter cut into one slice for each rank, slices end to end in sub-groups."""

import bisect
import functools

import torch

from deepspeed.checkpoint.layouts.saved_flat import element_states, type_of_step, with_names
from deepspeed.checkpoint.layouts.saved_state import Range, SavedState
from deepspeed.zero.flat_layout import per_element


class SlicedState(SavedState):
    """``shards``: what each rank saved as ``optimizer_state_dict``, in rank order; may read its files when indexed, and
    say with ``first`` whose facts that all share are at hand.

    ``param_shapes``: one dict name -> shape for each parameter group. ``fragments``: one dict name -> this rank's slice
    for each rank, of the parameters that are not trained, and ``frozen_shapes`` their whole shapes. ``aliases``:
    alias -> name, of tied parameters.
    """

    zero_stage = 3
    masters_only = True

    def __init__(self, shards, param_shapes, model=None, folder=None, fragments=(), frozen_shapes=None, aliases=()):
        super().__init__()
        self.folder, self.model = folder, model or {}
        self._shards = shards
        self._first = getattr(shards, "first", 0)
        self._fragments = fragments
        self._aliases = dict(aliases)
        self._frozen = {name: torch.Size(shape) for name, shape in (frozen_shapes or {}).items()}
        self._groups = [{name: torch.Size(shape) for name, shape in group.items()} for group in param_shapes]
        self._shapes = {name: shape for group in self._groups for name, shape in group.items()}
        self.dp_world_size = self._parts = len(shards) if len(shards) else max(1, len(fragments))
        self._places, at = {}, 0  # name -> offset of its slice among the slices of one rank, end to end
        for name, shape in self._shapes.items():
            self._places[name] = at
            at += -(-shape.numel() // self._parts)
        self._starts, held = [], 0  # of each sub-group in the same space
        for flat in shards[self._first]["fp32_flat_groups"] if len(shards) else ():
            self._starts.append(held)
            held += flat.numel()
        if len(shards) and held != at:
            raise ValueError(
                f"{self.origin()}: a rank's slices of {len(self._shapes)} parameters have {at} elements when "
                f"{self._parts} rank(s) share them, and its files hold {held}: they are of another model or shards "
                "are missing; load it with the model it is of"
            )

    def shapes(self):
        return self._shapes

    def has_optimizer(self):
        return len(self._shards) > 0

    def frozen_shapes(self):
        """dict: name -> torch.Size of parameters that are not trained."""
        return self._frozen

    def _cut(self):
        return set(self.model.get("module") or ()) - set(self.model.get("buffer_names") or ())

    def aliases(self):
        return dict(self._aliases)

    def weight_shape(self, name):
        return super().weight_shape(name) or self._frozen.get(name)

    def _inner(self, rank, run):
        state = (self._shards[rank].get("optimizer_state_dict") or {}).get("state") or {}
        return state.get(run, {})

    def _run_of(self, name):
        return bisect.bisect_right(self._starts, self._places[name]) - 1

    def param_groups(self):
        groups = (
            (self._shards[self._first].get("optimizer_state_dict") or {}).get("param_groups")
            if len(self._shards)
            else None
        )
        return with_names(groups or [{} for _ in self._groups], self._groups)

    def state_names(self):
        return element_states(self._inner(self._first, run) for run in range(len(self._starts)))

    def scalars(self, name):
        run = self._run_of(name)
        inner = self._inner(self._first, run)
        found = {key: value for key, value in inner.items() if not per_element(value) and key != "param_steps"}
        if "param_steps" in inner:
            members = [other for other in self._shapes if self._run_of(other) == run]
            found["step"] = type_of_step(found.get("step"), inner["param_steps"][members.index(name)])
        return found

    def state_pieces(self, name, kind):
        numel = self._shapes[name].numel()
        if numel == 0 or not len(self._shards):
            return []
        run = self._run_of(name)
        if kind != "fp32" and kind not in self._inner(self._first, run):
            return []
        base = self._places[name] - self._starts[run]
        slice_numel, found = -(-numel // self._parts), []
        for rank in range(self._parts):
            begin, end = rank * slice_numel, min((rank + 1) * slice_numel, numel)
            if begin >= end:
                break
            found.append((begin, end - begin, Range(functools.partial(self._tensor, rank, run, kind), base)))
        return found

    def _tensor(self, rank, run, kind):
        return self._shards[rank]["fp32_flat_groups"][run] if kind == "fp32" else self._inner(rank, run)[kind]

    def frozen_pieces(self, name):
        shape = self._frozen.get(name)
        if shape is None:
            return []
        numel, parts, found = shape.numel(), len(self._fragments), []
        slice_numel = -(-numel // parts)
        for rank in range(parts):
            begin, end = rank * slice_numel, min((rank + 1) * slice_numel, numel)
            if begin >= end:
                break
            found.append((begin, end - begin, Range(functools.partial(self._fragment, rank, name))))
        return found

    def _fragment(self, rank, name):
        return self._fragments[rank][name]

    def extra(self):
        keys = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
        return {
            key: self._shards[self._first][key]
            for key in keys
            if len(self._shards) and key in self._shards[self._first]
        }


class OwnShard:
    """The shards of ``count`` ranks of which only ``rank``'s is here: enough for a rank that reads what it saved."""

    def __init__(self, shard, rank, count):
        self._shard, self.first, self._count = shard, rank, count

    def __len__(self):
        return self._count

    def __getitem__(self, rank):
        if rank != self.first:
            raise IndexError(f"the slices of rank {rank} are needed and not given: pass the shards of all ranks")
        return self._shard
