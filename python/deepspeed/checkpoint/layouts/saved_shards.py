"""Layouts of files of torch.save: optimizer states of ZeRO by rank, and of runs without ZeRO as a whole.

Which elements of a parameter are in which tensor of which rank's file is planned in ``csrc/plan/saved_layout.h``.
"""

import functools

import torch

from deepspeed._native import _C
from deepspeed.checkpoint.layouts.saved_named import NamedParams, WithNamed
from deepspeed.checkpoint.layouts.saved_state import Range, SavedState, eager, with_names
from deepspeed.zero.optimizers.flat_layout import PARAM_SCALARS, PARAM_STEPS, per_element
from deepspeed.zero.states.named_states import OWN_PARAMS

_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis")
_BY_PARAM = (PARAM_STEPS, PARAM_SCALARS)
_EXTRA_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


def _step_like(like, number):
    """``number`` as a tensor where ``like`` is one, else as a number."""
    like = eager(like)
    return torch.full_like(like, float(number)) if torch.is_tensor(like) else number


class _ByUnit(SavedState):
    """States whose tensors each hold a unit of ``layout``, a ``_C.SavedLayout`` over the parameters of ``groups``: one
    dict name -> shape for each parameter group, end to end."""

    def __init__(self, groups, model, folder):
        super().__init__()
        self.folder, self.model = folder, model or {}
        self._groups = [{name: torch.Size(shape) for name, shape in group.items()} for group in groups]
        self._shapes = {name: shape for group in self._groups for name, shape in group.items()}
        self._index = {name: index for index, name in enumerate(name for group in self._groups for name in group)}
        self._layout = None

    def _numels(self):
        return [[shape.numel() for shape in group.values()] for group in self._groups]

    def _inner(self, rank, unit):
        """The optimizer's state of a unit in the file of a rank."""
        raise NotImplementedError

    def _master(self, rank, unit):
        raise NotImplementedError

    def shapes(self):
        return self._shapes

    def scalars(self, name):
        index = self._index[name]
        inner = self._inner(self._first, self._layout.unit(index))
        found = {key: value for key, value in inner.items() if not per_element(value) and key not in _BY_PARAM}
        place = self._layout.place_in_unit(index)
        if PARAM_STEPS in inner:
            found["step"] = _step_like(found.get("step"), inner[PARAM_STEPS][place])
        for key, values in inner.get(PARAM_SCALARS, {}).items():
            if values[place] is not None:
                found[key] = values[place]
        return found

    def state_pieces(self, name, kind):
        index = self._index[name]
        unit = self._layout.unit(index)
        # A state may have a value for each element in one group and be a single number in another.
        if kind != "fp32" and not per_element(self._inner(self._first, unit).get(kind)):
            return []
        return [
            (offset, numel, Range(functools.partial(self._tensor, rank, unit, kind), begin))
            for offset, numel, rank, begin in self._layout.runs(index)
        ]

    def _tensor(self, rank, unit, kind):
        return self._master(rank, unit) if kind == "fp32" else self._inner(rank, unit)[kind]


class _Shards(_ByUnit):
    """``shards``: what each rank saved as ``optimizer_state_dict``, in rank order; may read its files when indexed, and
    say with ``first`` whose facts that all share are at hand."""

    def __init__(self, shards, param_shapes, model, folder):
        super().__init__(param_shapes, model, folder)
        self._shards = shards
        self._first = getattr(shards, "first", 0)
        self._own = shards[self._first] if len(shards) else {}

    def state_names(self):
        states = [self._inner(self._first, unit) for unit in range(len(self._units))]
        return list(dict.fromkeys(key for state in states for key, value in state.items() if per_element(value)))

    def extra(self):
        return {key: self._own[key] for key in _EXTRA_KEYS if key in self._own}


class FlatState(_Shards):
    """ZeRO stages 1 and 2: a group's parameters end to end, cut into one piece for each rank; ``shards`` as above.

    ``param_shapes``: one dict name -> shape for each parameter group. Also reads the older forms: the elastic one
    (``base_optimizer_state`` is a list, without padding), and the one of bf16 without a ``zero_stage``.
    """

    def __init__(self, shards, param_shapes, model=None, folder=None):
        super().__init__(shards, param_shapes, model, folder)
        self.dp_world_size = len(shards)
        stage = self._own.get("zero_stage", 1)
        self.zero_stage = int(getattr(stage, "value", stage))
        masters = self._own["single_partition_of_fp32_groups"]
        if len(masters) != len(self._groups):
            raise ValueError(
                f"{self.origin()} has {len(masters)} groups of fp32 weights and {len(self._groups)} parameter groups: "
                "it is damaged, or of another kind of run"
            )
        self._units = masters
        paddings = self._own.get("group_paddings") or [0] * len(masters)
        sizes = [master.numel() + padding for master, padding in zip(masters, paddings)]
        self._layout = _C.SavedLayout.flat(self._numels(), sizes, self.dp_world_size, self.origin())

    def _inner(self, rank, group):
        saved = self._shards[rank].get("base_optimizer_state") or {}
        if isinstance(saved, (list, tuple)):
            return saved[group]
        keys = saved["param_groups"][group]["params"] if saved.get("param_groups") else [group]
        return (saved.get("state") or {}).get(keys[0], {}) if keys else {}

    def _master(self, rank, group):
        return self._shards[rank]["single_partition_of_fp32_groups"][group]

    def param_groups(self):
        saved = self._own.get("base_optimizer_state")
        return with_names(saved.get("param_groups") if isinstance(saved, dict) else None, self._groups)

    def scalars(self, name):
        found = super().scalars(name)
        if "step" not in found and "base_optimizer_state_step" in self._own:
            found["step"] = self._own["base_optimizer_state_step"]
        return found


class SlicedState(_Shards):
    """ZeRO stage 3: every parameter cut into one slice for each rank, slices end to end in sub-groups; ``shards`` as
    above.

    ``param_shapes``: one dict name -> shape for each parameter group. ``fragments``: one dict name -> this rank's slice
    for each rank, of the parameters that are not trained, and ``frozen_shapes`` their whole shapes. ``aliases``:
    alias -> name, of tied parameters.
    """

    zero_stage = 3
    masters_only = True

    def __init__(self, shards, param_shapes, model=None, folder=None, fragments=(), frozen_shapes=None, aliases=()):
        super().__init__(shards, param_shapes, model, folder)
        self._fragments, self._aliases = fragments, dict(aliases)
        self._frozen = {name: torch.Size(shape) for name, shape in (frozen_shapes or {}).items()}
        self.dp_world_size = len(shards) if len(shards) else max(1, len(fragments))
        self._units = [flat.numel() for flat in self._own.get("fp32_flat_groups", ())]
        numels = [shape.numel() for shape in self._shapes.values()]
        self._index = {name: index for index, name in enumerate(self._shapes)}
        self._layout = _C.SavedLayout.sliced(numels, self._units, self.dp_world_size, self.origin())

    def has_optimizer(self):
        return len(self._shards) > 0

    def frozen_shapes(self):
        return self._frozen

    def _cut(self):
        return set(self.model.get("module") or ()) - set(self.model.get("buffer_names") or ())

    def aliases(self):
        return dict(self._aliases)

    def weight_shape(self, name):
        return super().weight_shape(name) or self._frozen.get(name)

    def _inner(self, rank, unit):
        return ((self._shards[rank].get("optimizer_state_dict") or {}).get("state") or {}).get(unit, {})

    def _master(self, rank, unit):
        return self._shards[rank]["fp32_flat_groups"][unit]

    def param_groups(self):
        return with_names((self._own.get("optimizer_state_dict") or {}).get("param_groups"), self._groups)

    def state_pieces(self, name, kind):
        return super().state_pieces(name, kind) if len(self._shards) else []

    def frozen_pieces(self, name):
        if name not in self._frozen:
            return []
        layout = _C.SavedLayout.sliced([self._frozen[name].numel()], [], len(self._fragments), self.origin())
        return [
            (offset, numel, Range(lambda rank=rank: self._fragments[rank][name]))
            for offset, numel, rank, _ in layout.runs(0)
        ]


def flat_form(shards, shapes):
    """``FlatState`` of what all ranks have as ``optimizer_state_dict``, with what only some of them train."""
    return _with_own(FlatState(shards, shapes), shards)


def sliced_form(shards, shapes):
    """As ``flat_form``, ``SlicedState``."""
    return _with_own(SlicedState(shards, shapes), shards)


def _with_own(saved, shards):
    first = shards[getattr(shards, "first", 0)]
    if OWN_PARAMS not in first:
        return saved
    parts = [first] if hasattr(shards, "first") else shards
    return WithNamed(saved, NamedParams.of([part[OWN_PARAMS] for part in parts]))


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


class PlainState(_ByUnit):
    """Without ZeRO: whole weights in the model file, and one optimizer state that every rank has.

    ``optimizer``: what the optimizer's ``state_dict`` gave, of a torch optimizer or of the 16-bit wrapper around one
    (states of a group flat, or parameter by parameter); None without one. ``names``: the parameters of each group,
    which the files do not say, and ``shapes`` name -> shape. ``steps_are_real``: False for files in which only the last
    parameter of a group counts updates.
    """

    _first = 0

    def __init__(self, optimizer, names, shapes, model=None, folder=None, steps_are_real=True):
        self._wrapped = optimizer or {}
        self._saved = self._wrapped.get("optimizer_state_dict", self._wrapped)
        self._flat = self._wrapped.get("fp32_groups_flat")
        self._steps_are_real = steps_are_real
        super().__init__([{name: shapes[name] for name in group} for group in names], model, folder)
        self.dp_world_size = self.model.get("dp_world_size", 1)
        groups = self._saved.get("param_groups")
        if groups is not None and len(groups) != len(names):
            raise ValueError(
                f"{self.origin()} has {len(groups)} parameter groups, this run's optimizer has {len(names)}: make the "
                "same groups, or load it with load_optimizer_states=False"
            )
        numels = self._numels()
        for number, group in enumerate(numels):
            self._check(number, len(group), sum(group))
        self._keys = [key for group in groups or () for key in group["params"]]
        units = numels if self._flat is not None else [[numel] for group in numels for numel in group]
        self._layout = _C.SavedLayout.flat(units, [sum(unit) for unit in units], 1, self.origin())

    def _check(self, group, count, total):
        saved = self._saved.get("param_groups")
        held, wanted, what = (len(saved[group]["params"]) if saved is not None else count), count, "parameters"
        if self._flat is not None:
            held, wanted, what = self._flat[group].numel(), total, "elements"
        if held != wanted:
            raise ValueError(
                f"{self.origin()}: group {group} has {held} {what} saved, the model has {wanted}; it is of another "
                "model. Load it with load_optimizer_states=False, or with the model it is of"
            )

    def _inner(self, rank, unit):
        groups = self._saved.get("param_groups")
        if groups is None:
            return {}
        key = groups[unit]["params"][0] if self._flat is not None else self._keys[unit]
        return (self._saved.get("state") or {}).get(key, {})

    def _state(self, name):
        return self._inner(0, self._layout.unit(self._index[name]))

    def param_groups(self):
        return with_names(self._saved.get("param_groups"), self._groups)

    def state_names(self):
        states = [(name, self._state(name)) for name in self._index]
        return list(dict.fromkeys(kind for name, state in states for kind in state if self._whole(name, state[kind])))

    def _whole(self, name, value):
        """Whether a state has a value for each element; some optimizers keep rows and columns, or counts."""
        return per_element(value) and (self._flat is not None or tuple(value.shape) == tuple(self._shapes[name]))

    def scalars(self, name):
        state = self._state(name)
        found = {key: value for key, value in state.items() if not self._whole(name, value) and key not in _BY_PARAM}
        if PARAM_STEPS in state:
            place = self._layout.place_in_unit(self._index[name])
            found["step"] = _step_like(found.get("step"), state[PARAM_STEPS][place])
        elif not self._steps_are_real and isinstance(found.get("step"), int):
            group = next(group for group in self._groups if name in group)
            found["step"] = max(self._state(other).get("step", 0) for other in group)
        return found

    def state_pieces(self, name, kind):
        index = self._index[name]
        unit = self._layout.unit(index)
        if kind != "fp32":
            tensor = self._inner(0, unit).get(kind)
            tensor = tensor if self._whole(name, tensor) else None
        elif self._flat is not None:
            tensor = self._flat[unit]
        elif self._wrapped.get("fp32_groups") is not None:
            tensor = [master for group in self._wrapped["fp32_groups"] for master in group][index]
        else:
            tensor = (self.model.get("module") or {}).get(name)
            tensor = tensor if tensor is not None and tensor.dtype == torch.float32 else None
        if tensor is None:
            return []
        return [(offset, numel, Range(tensor, begin)) for offset, numel, _, begin in self._layout.runs(index)]

    def extra(self):
        found = {key: self._wrapped[key] for key in _EXTRA_KEYS[1:] if key in self._wrapped}
        if "cur_scale" in self._wrapped:
            found["loss_scaler"] = {key: self._wrapped[key] for key in _SCALER_KEYS if key in self._wrapped}
        return found
