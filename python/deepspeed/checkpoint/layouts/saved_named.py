"""States of parameters by their names, in any number of pieces: what only some ranks train, and everything in a model
whose ranks have different parameters and no ZeRO. How they are saved: ``zero/states/named_states.py``."""

import functools

import torch

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.saved_state import Range, SavedOver
from deepspeed.checkpoint.read import storage
from deepspeed.formats.recorded_paths import path_below
from deepspeed.zero.states.named_states import OWN_PARAMS, joined_tables, table_of


def pieces_of(runs, shape, strides=None):
    """``SavedState.pieces`` of ``[(offset, tensor)]``, in order. ``strides``: of a tensor whose pieces are in the order
    of its memory."""
    numel = torch.Size(shape).numel()
    if strides is not None and runs and sum(_numel(tensor) for _, tensor in runs) == numel:
        return [(0, numel, Range(functools.partial(_in_rows, runs, shape, strides)))]
    return [(offset, _numel(tensor), Range(tensor)) for offset, tensor in runs]


def _numel(tensor):
    return torch.Size(tensor.shape).numel()


def _in_rows(runs, shape, strides):
    flat = torch.cat([Range(tensor).read_range(0, _numel(tensor)) for _, tensor in runs])
    return flat.as_strided(shape, strides)


class NamedParams:
    """``table``: name -> what is known of a parameter (``joined_tables``); ``part(rank)``: what that rank has saved
    (``own_params``), asked for when it is needed."""

    def __init__(self, table, part):
        self._table, self._part = table, part

    @classmethod
    def of(cls, parts):
        """Of what all ranks have saved, in a list."""
        return cls(joined_tables([table_of(part) for part in parts]), parts.__getitem__)

    def shapes(self):
        return {name: torch.Size(about["shape"]) for name, about in self._table.items()}

    def of_group(self, number):
        """Names of the parameters of a parameter group."""
        return [name for name, about in self._table.items() if about["group"] == number]

    def state_names(self):
        kinds = dict.fromkeys(kind for about in self._table.values() for kind in about["kinds"])
        return [kind for kind in kinds if kind != "fp32"]

    def _parts(self, name):
        return (self._part(rank) for rank in self._table[name]["ranks"])

    def scalars(self, name):
        for part in self._parts(name):
            step = part["parameters"][name].get("step")
            found = dict(part["scalars"].get(name) or {})
            if step is not None or found:
                return found if step is None else {"step": step, **found}
        return {}

    def pieces(self, name, kind):
        runs, strides = {}, None
        for part in self._parts(name) if kind in self._table[name]["kinds"] else ():
            strides = part["strides"].get(name) or strides
            for offset, tensor in part["tensors"].get(kind, {}).get(name, ()):
                runs.setdefault(offset, tensor)  # of equal ones the first rank's
        return pieces_of(sorted(runs.items(), key=lambda run: run[0]), self._table[name]["shape"], strides)


class WithNamed(SavedOver):
    """``base``: the ``SavedState`` of what all ranks train. ``named``: ``NamedParams`` of the others. ``weights``: name
    -> tensor or lazy tensor of weights and buffers that are in files of their own. ``optimizer``: without ZeRO, what
    is saved once: ``param_groups`` and values of the optimizer as a whole."""

    def __init__(self, base, named, weights=None, optimizer=None):
        super().__init__(base)
        self._named, self._weights, self._optimizer = named, weights or {}, optimizer
        self._own = named.shapes()

    def shapes(self):
        return {**self._base.shapes(), **self._own}

    def param_groups(self):
        groups = self._base.param_groups() if self._optimizer is None else self._optimizer["param_groups"]
        return [
            {**group, "names": [*group.get("names", ()), *self._named.of_group(number)]}
            for number, group in enumerate(groups)
        ]

    def state_names(self):
        return list(dict.fromkeys([*self._base.state_names(), *self._named.state_names()]))

    def scalars(self, name):
        return self._named.scalars(name) if name in self._own else self._base.scalars(name)

    def state_pieces(self, name, kind):
        named = name in self._own
        return self._named.pieces(name, kind) if named else self._base.state_pieces(name, kind)

    def has_optimizer(self):
        return self._base.has_optimizer() if self._optimizer is None else True

    def extra(self):
        return self._base.extra() if self._optimizer is None else dict(self._optimizer["extra"])

    def module(self):
        return {**self._base.module(), **self._weights}

    def weight_shape(self, name):
        return super().weight_shape(name) or self._base.weight_shape(name)


# ---- files ---------------------------------------------------------------------------------------------------------


def expert_files(folder, mp_rank=0, numbers=None):
    """Names of the files of experts' weights in ``folder``, of those with these ``numbers`` (None: all)."""
    return [
        name
        for name, known in names.EXPERT_STATES.found_in(folder).items()
        if known["mp_rank"] == mp_rank and (numbers is None or known["expert"] in numbers)
    ]


def expert_weights(folder, mp_rank, numbers, listed):
    """name -> lazy tensor of all weights and buffers in them. ``listed``: names of the files that were saved.

    FileNotFoundError for one that is not there, ValueError for a file of something else.
    """
    files = set(expert_files(folder, mp_rank, numbers))
    for name in listed:
        known = names.EXPERT_STATES.find(str(name))
        if known is None:
            raise ValueError(f"a model file in {folder} lists {name!r} among its files of experts: it is damaged")
        if numbers is None or known["expert"] in numbers:
            files.add(name)
    found = {}
    for name in sorted(files):
        path = path_below(folder, name, f"a model file in {folder}", "entry")
        state = storage.read(path, lazy=True)
        if not isinstance(state, dict):
            raise ValueError(f"{path} is no file of an expert: it holds no weights by name")
        found.update(state)
    return found


def with_named(saved, folder, mp_rank, shards=None, experts=None):
    """``saved`` with what lies beside it in files of experts and by name; itself where there is neither. ``shards``:
    optimizer states of the ranks, with ZeRO. ``experts``: numbers of those whose weights are wanted."""
    about = saved.model.get(names.PARAMS_BY_RANK) or {}
    weights = expert_weights(folder, mp_rank, experts, about.get("experts") or ())
    table = about.get("table") or {}
    if not table and not weights:
        return saved
    if shards is not None:
        named = NamedParams(table, lambda rank: _own_of(shards[rank], shards.path(rank)))
        return WithNamed(saved, named, weights)
    if not table:
        return WithNamed(saved, NamedParams({}, None), weights)
    part = functools.lru_cache(maxsize=None)(lambda number: _expert_optim_states(folder, number, mp_rank))
    return WithNamed(saved, NamedParams(table, lambda number: _own_of(part(number), folder)), weights, part(0))


def _own_of(state, path):
    if OWN_PARAMS not in state:
        raise ValueError(f"{path} has no states of parameters that only some ranks train, which others say it has")
    return state[OWN_PARAMS]


def _expert_optim_states(folder, number, mp_rank):
    path = names.EXPERT_OPTIM_STATES.path(folder, expp_rank=number, mp_rank=mp_rank)
    return storage.read(path, lazy=True)["optimizer"]
