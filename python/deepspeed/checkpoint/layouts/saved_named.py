"""States of parameters by their names, in any number of pieces: what only some ranks train, and everything in a model
whose ranks have different parameters and no ZeRO. How they are saved: ``zero/states/named_states.py``."""

import functools

import torch

from deepspeed.checkpoint.layouts import names, storage
from deepspeed.checkpoint.layouts.saved_state import Joined, Range, SavedState, numel_of, with_names
from deepspeed.formats.recorded_paths import path_below
from deepspeed.zero.states.named_states import OWN_PARAMS


class ByName(SavedState):
    """States by the names of parameters, each in any number of pieces. ``_parts(name, kind=None)`` of a layout gives
    what each rank with elements of a parameter (of that kind) has saved, in the form of ``OwnedStates.by_name``."""

    def scalars(self, name):
        for part in self._parts(name):
            step = part["parameters"][name].get("step")
            found = dict(part["scalars"].get(name) or {})
            if step is not None or found:
                return found if step is None else {"step": step, **found}
        return {}

    def state_pieces(self, name, kind):
        return self._pieces(name, kind, self.shapes[name])

    def _pieces(self, name, kind, shape):
        found, strides = {}, None  # strides: of a tensor whose pieces are in the order of its memory
        for part in self._parts(name, kind):
            strides = part["strides"].get(name) or strides
            for offset, tensor in part["tensors"].get(kind, {}).get(name, ()):
                found.setdefault(offset, tensor)  # of equal ones the first rank's
        runs = sorted(found.items(), key=lambda run: run[0])
        if strides is not None and runs and sum(numel_of(tensor) for _, tensor in runs) == shape.numel():
            return [(0, shape.numel(), Range(functools.partial(_in_rows, runs, shape, strides)))]
        return [(offset, numel_of(tensor), Range(tensor)) for offset, tensor in runs]


def _in_rows(runs, shape, strides):
    flat = torch.cat([Range(tensor).read_range(0, numel_of(tensor)) for _, tensor in runs])
    return flat.as_strided(shape, strides)


class NamedState(ByName):
    """``table``: name -> what is known of a parameter (``joined_tables``); ``part(rank)``: what the rank, one of the
    entry's, has saved (``OwnedStates.by_name``), asked for when it is needed. ``optimizer``: without ZeRO, what is
    saved once: ``param_groups`` and values of the optimizer as a whole."""

    masters_only = True

    def __init__(self, table, part, optimizer=None):
        super().__init__()
        self._table, self._part = table, part
        self.shapes = {name: torch.Size(about["shape"]) for name, about in table.items()}
        count = 1 + max((about["group"] for about in table.values()), default=-1)
        groups = [{} for _ in range(count)] if optimizer is None else optimizer["param_groups"]
        members = [[name for name, about in table.items() if about["group"] == number] for number in range(len(groups))]
        self.param_groups = with_names(groups, members)
        self.extra = {} if optimizer is None else dict(optimizer["extra"])

    def state_names(self):
        kinds = dict.fromkeys(kind for about in self._table.values() for kind in about["kinds"])
        return [kind for kind in kinds if kind != "fp32"]

    def _parts(self, name, kind=None):
        about = self._table[name]
        return (self._part(rank) for rank in (about["ranks"] if kind is None or kind in about["kinds"] else ()))


# ---- files ---------------------------------------------------------------------------------------------------------


def expert_files(folder, mp_rank=0, numbers=None):
    """Names of the files of experts' weights in ``folder``, of those with these ``numbers`` (None: all)."""
    return [
        name
        for name, known in names.EXPERT_STATES.found_in(folder).items()
        if known["mp_rank"] == mp_rank and (numbers is None or known["expert"] in numbers)
    ]


def weights_in(folder, name, what):
    """The content of a file of weights by name, lazy. ``what`` it is of, for the ValueError for a file of something
    else. FileNotFoundError for one that is not there."""
    path = path_below(folder, name, f"a model file in {folder}", "entry")
    state = storage.read(path, lazy=True)
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not a file of {what}: it holds no weights by name")
    return state


def expert_weights(folder, mp_rank, numbers, listed):
    """name -> lazy tensor of all weights and buffers in them. ``listed``: names of the files that were saved.

    Raises as ``weights_in``, and ValueError for a list of other files.
    """
    files = set(expert_files(folder, mp_rank, numbers))
    for name in listed:
        known = names.EXPERT_STATES.find(str(name))
        if known is None:
            raise ValueError(f"a model file in {folder} lists {name!r} among its files of experts: it is damaged")
        if numbers is None or known["expert"] in numbers:
            files.add(name)
    return {key: value for name in sorted(files) for key, value in weights_in(folder, name, "an expert").items()}


def with_named(saved, folder, mp_rank, shards_of, experts=None):
    """``saved`` with what lies beside it in files of experts and by name; itself where there is neither.
    ``shards_of(mp_rank)``: the optimizer states of the ranks, with ZeRO, or None. ``experts``: numbers of those whose
    weights are wanted."""
    about = saved.model.get(names.PARAMS_BY_RANK) or {}
    weights = expert_weights(folder, mp_rank, experts, about.get("experts") or ())
    if about.get("frozen_rows"):
        weights.update(weights_in(folder, names.FROZEN_ROWS(mp_rank=mp_rank), "frozen weights"))
    table = _numbered(about.get("table"), mp_rank)
    for number, other in (about.get("beside") or {}).items():  # parts that other model-parallel ranks have
        for name, entry in _numbered(other, int(number)).items():
            own = table.setdefault(name, {**entry, "ranks": []})
            own["ranks"] = own["ranks"] + entry["ranks"]
            own["kinds"] = list(dict.fromkeys([*own["kinds"], *entry["kinds"]]))

    @functools.lru_cache(maxsize=None)
    def alone(place):
        path = names.EXPERT_OPTIM_STATES.path(folder, expp_rank=place[1], mp_rank=place[0])
        return storage.read(path, lazy=True)["optimizer"]

    def of_rank(place):
        shards = shards_of(place[0])
        return _own_of(shards[place[1]], shards.path(dp_rank=place[1]))

    if table and shards_of(mp_rank) is not None:
        states = [saved, NamedState(table, of_rank)]
    elif table:
        states = [saved, NamedState(table, lambda place: _own_of(alone(place), folder), alone((mp_rank, 0)))]
    else:
        states = [saved]
    return Joined(states, saved.model, weights) if table or weights else saved


def _numbered(table, mp_rank):
    """``table`` with ``(mp_rank, rank)`` in place of the numbers of ranks."""
    return {
        name: {**about, "ranks": [(mp_rank, rank) for rank in about["ranks"]]} for name, about in (table or {}).items()
    }


def _own_of(state, path):
    if OWN_PARAMS not in state:
        raise ValueError(f"{path} has no states of parameters that only some ranks train, which others say it has")
    return state[OWN_PARAMS]
