"""Layouts of files of torch.save: optimizer states of ZeRO by rank, and of runs without ZeRO as a whole.

Which elements of a parameter are in which tensor of which rank's file is planned in ``csrc/plan/saved_layout.h``.
"""

import functools

import torch

from deepspeed._native import _C
from deepspeed.checkpoint.layouts.saved_named import NamedState
from deepspeed.checkpoint.layouts.saved_state import (
    EXTRA_KEYS,
    Joined,
    Range,
    SavedState,
    eager,
    numel_of,
    with_names,
)
from deepspeed.zero.optimizers.inner_states import PARAM_SCALARS, PARAM_STEPS, per_element
from deepspeed.zero.states.named_states import OWN_PARAMS, joined_tables, table_of

_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis")


class Shards:
    """The ``optimizer_state_dict`` of each of ``count`` ranks: ``read(rank)``, called once for each rank. Facts
    that all share are those of the rank ``first``. ``path(dp_rank=)``: the file of a rank."""

    def __init__(self, read, first, count=None, path=None):
        self._read, self.first, self.path = functools.lru_cache(maxsize=None)(read), first, path
        said = self[first].get("partition_count", 1) if count is None else count
        self._count = max(said, default=1) if isinstance(said, (list, tuple)) else int(said)

    def __len__(self):
        return self._count

    def __getitem__(self, rank):
        return self._read(rank)


def own_shard(shard, rank, count):
    """The shards of ``count`` ranks of which only ``rank``'s is here: enough for a rank that reads what it saved."""

    def read(other):
        if other != rank:
            raise IndexError(f"the slices of rank {other} are needed and not given: pass the shards of all ranks")
        return shard

    return Shards(read, rank, count)


class UnitState(SavedState):
    """States whose tensors each hold a unit of ``_layout``, a ``_C.SavedLayout`` over the parameters of
    ``param_shapes``: one dict name -> shape for each parameter group, end to end. ``_units``: one item for each unit.

    ``shards``: what each rank saved as ``optimizer_state_dict``, in rank order: a list or ``Shards``. A layout says
    what a rank's file has of a unit: ``_inner(rank, unit)``, the optimizer's state, and ``_master(rank, unit)``, its
    fp32 weights, or None.
    """

    _whole_shapes = None  # of each unit, where only states of the same shape have a value for each element

    def __init__(self, shards, param_shapes, model=None, folder=None):
        super().__init__(model, folder)
        self._shards, self._first = shards, getattr(shards, "first", 0)
        self._own = shards[self._first] if len(shards) else {}
        self._members = [{name: torch.Size(shape) for name, shape in group.items()} for group in param_shapes]
        self.shapes = {name: shape for group in self._members for name, shape in group.items()}
        self._index = {name: index for index, name in enumerate(name for group in self._members for name in group)}
        self._numels = [[shape.numel() for shape in group.values()] for group in self._members]
        self.extra = {key: self._own[key] for key in EXTRA_KEYS if key in self._own}
        self.dp_world_size = len(shards)

    def _tensor(self, rank, unit, kind):
        return self._master(rank, unit) if kind == "fp32" else self._inner(rank, unit)[kind]

    def _has_elements(self, unit, value):
        """Whether a state has a value for each element; some optimizers keep rows and columns, or counts."""
        return per_element(value) and (self._whole_shapes is None or tuple(value.shape) == self._whole_shapes[unit])

    def state_names(self):
        states = [(unit, self._inner(self._first, unit)) for unit in range(len(self._units))]
        kinds = (kind for unit, state in states for kind, value in state.items() if self._has_elements(unit, value))
        return list(dict.fromkeys(kinds))

    def scalars(self, name):
        index = self._index[name]
        unit, position = self._layout.unit(index), self._layout.index_in_unit(index)
        inner = self._inner(self._first, unit).items()
        found = {key: value for key, value in inner if not self._has_elements(unit, value)}
        steps, others = found.pop(PARAM_STEPS, None), found.pop(PARAM_SCALARS, {})
        if steps is not None:
            like = eager(found.get("step"))
            found["step"] = torch.full_like(like, float(steps[position])) if torch.is_tensor(like) else steps[position]
        return {**found, **{key: values[position] for key, values in others.items() if values[position] is not None}}

    def state_pieces(self, name, kind):
        index = self._index[name]
        unit = self._layout.unit(index)
        # A state may have a value for each element in one group and be a single number in another.
        if kind == "fp32":
            found = self._master(self._first, unit) is not None
        else:
            found = self._has_elements(unit, self._inner(self._first, unit).get(kind))
        return [
            (offset, numel, Range(functools.partial(self._tensor, rank, unit, kind), begin))
            for offset, numel, rank, begin in (self._layout.runs(index) if found else ())
        ]


class FlatState(UnitState):
    """ZeRO stages 1 and 2: a group's parameters end to end, cut into one piece for each rank.

    Also reads the older forms: the elastic one (``base_optimizer_state`` is a list, without padding), and the one of
    bf16 without a ``zero_stage``.
    """

    def __init__(self, shards, param_shapes, model=None, folder=None):
        super().__init__(shards, param_shapes, model, folder)
        stage = self._own.get("zero_stage", 1)
        self.zero_stage = int(getattr(stage, "value", stage))
        masters = self._units = self._own["single_partition_of_fp32_groups"]
        if len(masters) != len(self._members):
            raise ValueError(
                f"{self.origin()} has {len(masters)} groups of fp32 weights and {len(self._members)} parameter groups: "
                "it is damaged, or of another kind of run"
            )
        paddings = self._own.get("group_paddings") or [0] * len(masters)
        sizes = [master.numel() + padding for master, padding in zip(masters, paddings)]
        self._layout = _C.SavedLayout.flat(self._numels, sizes, len(shards), self.origin())
        saved = self._own.get("base_optimizer_state")
        self.param_groups = with_names(saved.get("param_groups") if isinstance(saved, dict) else None, self._members)

    def _inner(self, rank, group):
        saved = self._shards[rank].get("base_optimizer_state") or {}
        if isinstance(saved, (list, tuple)):
            return saved[group]
        keys = saved["param_groups"][group]["params"] if saved.get("param_groups") else [group]
        return (saved.get("state") or {}).get(keys[0], {}) if keys else {}

    def _master(self, rank, group):
        return self._shards[rank]["single_partition_of_fp32_groups"][group]

    def scalars(self, name):
        found = super().scalars(name)
        if "step" not in found and "base_optimizer_state_step" in self._own:
            found["step"] = self._own["base_optimizer_state_step"]
        return found


class SlicedState(UnitState):
    """ZeRO stage 3: every parameter cut into one slice for each rank, slices end to end in sub-groups.

    ``fragments(rank)``: name -> that rank's slice, of ``ranks`` ranks, of the parameters that are not trained, and
    ``frozen_shapes`` their whole shapes. ``aliases``: alias -> name, of tied parameters.
    """

    zero_stage = 3
    masters_only = True

    def __init__(
        self, shards, param_shapes, model=None, folder=None, fragments=None, ranks=1, frozen_shapes=None, aliases=()
    ):
        super().__init__(shards, param_shapes, model, folder)
        self._fragments, self.aliases = fragments, dict(aliases)
        self.frozen_shapes = {name: torch.Size(shape) for name, shape in (frozen_shapes or {}).items()}
        self.dp_world_size = len(shards) or ranks
        self._units = [flat.numel() for flat in self._own.get("fp32_flat_groups", ())]
        numels = [numel for group in self._numels for numel in group]
        self._layout = _C.SavedLayout.sliced(numels, self._units, self.dp_world_size, self.origin())
        groups = (self._own.get("optimizer_state_dict") or {}).get("param_groups")
        self.param_groups = with_names(groups, self._members)

    def has_optimizer(self):
        return len(self._shards) > 0

    def module(self):
        """The whole tensors of the model file, which has empty placeholders for parameters."""
        buffers = set(self.model.get("buffer_names") or ())
        return {name: value for name, value in super().module().items() if name in buffers or numel_of(value) > 0}

    def _inner(self, rank, unit):
        return ((self._shards[rank].get("optimizer_state_dict") or {}).get("state") or {}).get(unit, {})

    def _master(self, rank, unit):
        return self._shards[rank]["fp32_flat_groups"][unit]

    def frozen_pieces(self, name):
        if name not in self.frozen_shapes:
            return []
        layout = _C.SavedLayout.sliced([self.frozen_shapes[name].numel()], [], self.dp_world_size, self.origin())
        return [
            (offset, numel, Range(lambda rank=rank: self._fragments(rank)[name]))
            for offset, numel, rank, _ in layout.runs(0)
        ]


class PlainState(UnitState):
    """Without ZeRO: whole weights in the model file, and one optimizer state that every rank has.

    ``optimizer``: what the optimizer's ``state_dict`` gave, of a torch optimizer or of the 16-bit wrapper around one
    (states of a group flat, or parameter by parameter); None without one. ``names``: the parameters of each group,
    which the files do not say, and ``shapes`` name -> shape. ``steps_are_real``: False for files in which only the last
    parameter of a group counts updates.
    """

    def __init__(self, optimizer, names, shapes, model=None, folder=None, steps_are_real=True):
        super().__init__([optimizer or {}], [{name: shapes[name] for name in group} for group in names], model, folder)
        self.dp_world_size = self.model.get("dp_world_size", 1)
        if "cur_scale" in self._own:
            self.extra["loss_scaler"] = {key: self._own[key] for key in _SCALER_KEYS if key in self._own}
        saved, flat = self._own.get("optimizer_state_dict", self._own), self._own.get("fp32_groups_flat")
        groups = saved.get("param_groups")
        if groups is not None and len(groups) != len(names):
            raise ValueError(
                f"{self.origin()} has {len(groups)} parameter groups, this run's optimizer has {len(names)}: make the "
                "same groups, or load it with load_optimizer_states=False"
            )
        for number, numels in enumerate(self._numels):
            if flat is not None:
                held, wanted, what = flat[number].numel(), sum(numels), "elements"
            else:
                held, wanted, what = len(groups[number]["params"] if groups else numels), len(numels), "parameters"
            if held != wanted:
                raise ValueError(
                    f"{self.origin()}: group {number} has {held} {what} saved, the model has {wanted}; it is of "
                    "another model. Load it with load_optimizer_states=False, or with the model it is of"
                )
        self.param_groups = with_names(groups, self._members)
        if flat is not None:
            keys, self._units, self._masters = [group["params"][0] for group in groups or ()], self._numels, flat
        else:
            keys = [key for group in groups or () for key in group["params"]]
            self._units = [[numel] for group in self._numels for numel in group]
            self._whole_shapes = [tuple(shape) for group in self._members for shape in group.values()]
            self._masters = self._own_masters()
        self._layout = _C.SavedLayout.flat(self._units, [sum(unit) for unit in self._units], 1, self.origin())
        states = saved.get("state") or {}
        self._states = [states.get(key, {}) for key in keys] or [{}] * len(self._units)
        self._steps_are_real = steps_are_real

    def _own_masters(self):
        """The fp32 weights of each parameter, or None."""
        if self._own.get("fp32_groups") is not None:
            return [master for group in self._own["fp32_groups"] for master in group]
        module = self.model.get("module") or {}
        weights = [module.get(name) for group in self._members for name in group]
        return [weight if weight is not None and weight.dtype == torch.float32 else None for weight in weights]

    def _inner(self, rank, unit):
        return self._states[unit]

    def _master(self, rank, unit):
        return self._masters[unit]

    def scalars(self, name):
        found = super().scalars(name)
        if not self._steps_are_real and isinstance(found.get("step"), int):
            group = next(group for group in self._members if name in group)
            units = [self._layout.unit(self._index[other]) for other in group]
            found["step"] = max(self._states[unit].get("step", 0) for unit in units)
        return found


def in_memory(layout, shards, shapes):
    """A ``FlatState`` or ``SlicedState`` (``layout``) of what all ranks have as ``optimizer_state_dict``, with what
    only some of them train."""
    saved, first = layout(shards, shapes), shards[getattr(shards, "first", 0)]
    if OWN_PARAMS not in first:
        return saved
    parts = [part[OWN_PARAMS] for part in ([first] if hasattr(shards, "first") else shards)]
    named = NamedState(joined_tables([table_of(part) for part in parts]), parts.__getitem__)
    return Joined([saved, named], saved.model)
