"""The layout of ZeRO stages 1 and 2: a group's parameters end to end, cut into one piece for each rank."""

import functools

import torch

from deepspeed.checkpoint.layouts.saved_state import Range, SavedState, eager
from deepspeed.zero.flat_layout import per_element


def element_states(states):
    """The names of what has a value for each element in any of ``states``, each once."""
    return list(dict.fromkeys(key for state in states for key, value in state.items() if per_element(value)))


def with_names(groups, named):
    """Hyperparameters of saved parameter groups beside the names of their parameters."""
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "names": list(names)}
        for group, names in zip(groups, named)
    ]


class FlatState(SavedState):
    """``shards``: what each rank saved as ``optimizer_state_dict``, in rank order; may read its files when indexed, and
    say with ``first`` whose facts that all share are at hand.

    ``param_shapes``: one dict name -> shape for each parameter group. Also reads the older forms: the elastic one
    (``base_optimizer_state`` is a list, without padding), and the one of bf16 without a ``zero_stage``.
    """

    def __init__(self, shards, param_shapes, model=None, folder=None):
        super().__init__()
        self.folder, self.model = folder, model or {}
        self._shards = shards
        self.dp_world_size = len(shards)
        self._first = getattr(shards, "first", 0)
        first = shards[self._first]
        self.zero_stage = int(getattr(first.get("zero_stage", 1), "value", first.get("zero_stage", 1)))
        masters = first["single_partition_of_fp32_groups"]
        self._groups = [{name: torch.Size(shape) for name, shape in group.items()} for group in param_shapes]
        if len(masters) != len(self._groups):
            raise ValueError(
                f"{self.origin()} has {len(masters)} groups of fp32 weights and {len(self._groups)} parameter groups: "
                "it is damaged, or of another kind of run"
            )
        self._shapes = {name: shape for group in self._groups for name, shape in group.items()}
        paddings = first.get("group_paddings") or [0] * len(masters)
        self._sizes = [master.numel() + padding for master, padding in zip(masters, paddings)]  # of a partition
        self._places = {}  # name -> (group, offset in the group, numel)
        for number, group in enumerate(self._groups):
            offset = 0
            for name, shape in group.items():
                self._places[name] = (number, offset, shape.numel())
                offset += shape.numel()
            self._check(number, offset)

    def _check(self, group, total):
        size, count = self._sizes[group], self.dp_world_size
        if total > size * count:
            raise ValueError(
                f"{self.origin()}: parameter group {group} has {total} elements, and its {count} shard(s) of {size} "
                f"hold {size * count}. The model has other parameters than the one that was saved, or shards are "
                "missing; load it with the model it is of"
            )

    def shapes(self):
        return self._shapes

    def _inner(self, rank, group):
        saved = self._shards[rank].get("base_optimizer_state") or {}
        if isinstance(saved, (list, tuple)):
            return saved[group]
        state = saved.get("state") or {}
        keys = saved["param_groups"][group]["params"] if saved.get("param_groups") else [group]
        return state.get(keys[0], {}) if keys else {}

    def param_groups(self):
        saved = self._shards[self._first].get("base_optimizer_state")
        known = saved.get("param_groups") if isinstance(saved, dict) else None
        groups = known or [{} for _ in self._groups]
        return with_names(groups, self._groups)

    def state_names(self):
        return element_states(self._inner(self._first, group) for group in range(len(self._groups)))

    def scalars(self, name):
        group, _, _ = self._places[name]
        inner = self._inner(self._first, group)
        found = {key: value for key, value in inner.items() if not per_element(value) and key != "param_steps"}
        if "param_steps" in inner:
            found["step"] = type_of_step(found.get("step"), inner["param_steps"][list(self._groups[group]).index(name)])
        elif "step" not in found and "base_optimizer_state_step" in self._shards[self._first]:
            found["step"] = self._shards[self._first]["base_optimizer_state_step"]
        return found

    def state_pieces(self, name, kind):
        group, offset, numel = self._places[name]
        if kind != "fp32" and kind not in self._inner(self._first, group):
            return []
        size, found, at = self._sizes[group], [], 0
        while at < numel:
            rank = (offset + at) // size
            base = (offset + at) - rank * size
            run = min(numel - at, size - base)
            found.append((at, run, Range(functools.partial(self._tensor, rank, group, kind), base)))
            at += run
        return found

    def _tensor(self, rank, group, kind):
        if kind == "fp32":
            return self._shards[rank]["single_partition_of_fp32_groups"][group]
        return self._inner(rank, group)[kind]

    def extra(self):
        keys = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
        return {key: self._shards[self._first][key] for key in keys if key in self._shards[self._first]}


def type_of_step(like, number):
    """``number`` as a tensor where ``like`` is one, else as a number."""
    like = eager(like)
    return torch.full_like(like, float(number)) if torch.is_tensor(like) else number
