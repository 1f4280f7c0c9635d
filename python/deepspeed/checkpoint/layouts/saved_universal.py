"""The layout of universal checkpoints: one folder for each parameter, one file with each whole state."""

import collections
import dataclasses
import functools
import os
import re
from typing import List, Tuple, Union

import torch

from deepspeed import _native
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.layouts import names, storage
from deepspeed.checkpoint.layouts.names import OPTIMIZER_STATE, STEP, ZERO_FOLDER
from deepspeed.checkpoint.layouts.saved_state import EXTRA_KEYS, Latest, Range, SavedState, eager, with_names
from deepspeed.formats.recorded_paths import path_below
from deepspeed.utils.param_cut import cut_of
from deepspeed.utils.tensor_slices import cut_of_table, cut_of_widths, even_cut, join, narrow

# ---- universal info ------------------------------------------------------------------------------------------------
# What a model says about its tensor-parallel slices: the ``universal_checkpoint_info`` of a checkpoint.


@dataclasses.dataclass
class SubparamShape:
    """Parameters (regular expressions in ``patterns``) that hold several sub-parameters side by side.

    ``shape`` is the whole parameter's, in which a tuple stands for sizes that lie end to end in that dimension: a fused
    query, key and value is ``((q, k, v), hidden)``. ``partition_dim``: the dimension that tensor parallelism cuts, each
    sub-parameter on its own.
    """

    __module__ = "deepspeed.checkpoint.universal_checkpoint"  # where pickles of every implementation look for it

    patterns: List[str]
    shape: Tuple[Union[Tuple[int], int]]
    partition_dim: int


_PATTERN_KEYS = (
    keys.TP_REPLICATED_PARAMETER_PATTERNS,  # every tensor-parallel rank has the same values
    keys.PARAMETER_TO_AVERAGE_PATTERNS,  # every one has values of its own; a whole parameter is their mean
    keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,  # cut along dimension 1
    keys.VOCABULARY_PARAMETER_PATTERNS,  # its rows are words, padded at the end
    keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,  # two equal parameters end to end in dimension 0, each cut on its own
)


class ParallelRules:
    """Rules by which the slices of a parameter make a whole one, by its name. Patterns match at the start of a name.

    A parameter without a pattern is cut along dimension 0. ``tables``: name -> ``[dimension, runs of each rank]`` of
    parameters whose slices no pattern can describe.
    """

    def __init__(self, info, tables=None):
        self.info, self.tables = info or {}, tables or {}
        self.sub_params = [_sub_param(entry) for entry in self.info.get(keys.PARAMETER_WITH_SUB_PARAMS, ())]
        self.used = set()

    def patterns(self):
        """Every pattern that a parameter should match."""
        found = {pattern for key in _PATTERN_KEYS for pattern in self.info.get(key, ())}
        return found | {pattern for entry in self.sub_params for pattern in entry.patterns}

    def _find(self, patterns, name):
        found = [pattern for pattern in patterns if re.match(pattern, name)][:1]
        self.used.update(found)
        return bool(found)

    def lists(self, key, name):
        """Whether a pattern of the list ``key`` matches a parameter."""
        return self._find(self.info.get(key, ()), name)

    def sub_param(self, name):
        """The ``SubparamShape`` of a parameter, or None."""
        return next((entry for entry in self.sub_params if self._find(entry.patterns, name)), None)


def _sub_param(entry):
    if isinstance(entry, SubparamShape):
        return entry
    wanted = {field.name for field in dataclasses.fields(SubparamShape)}
    if not isinstance(entry, dict) or not wanted <= set(entry):
        raise ValueError(
            f"{keys.UNIVERSAL_CHECKPOINT_INFO}.{keys.PARAMETER_WITH_SUB_PARAMS} has the entry {entry!r}; each one is a "
            f"SubparamShape or a dict with {sorted(wanted)}"
        )
    return SubparamShape(**{key: entry[key] for key in wanted})


def sub_sizes(shape, dim):
    """Sizes of the sub-parameters along ``dim`` of a ``SubparamShape.shape``, and the shape with sums in place."""
    whole = tuple(sum(size) if isinstance(size, (tuple, list)) else int(size) for size in shape)
    sizes = shape[dim] if isinstance(shape[dim], (tuple, list)) else (shape[dim],)
    return tuple(int(size) for size in sizes), whole


# ---- universal slices ----------------------------------------------------------------------------------------------
# Tensor-parallel slices of a parameter put together, and cut again for another number of ranks.


def equal_parts(size, count):
    """The sizes of ``count`` sub-parameters that are equal and lie side by side in ``size`` elements."""
    return [stop - start for start, stop in _native._C.unit_runs(size, count)]


def join_parts(slices, dim, count):
    """The whole tensor of the ranks' slices, which have ``count`` equal sub-parameters side by side."""
    widths = list(zip(*(equal_parts(one.shape[dim], count) for one in slices), strict=True))
    return join(slices, dim, cut_of_widths([sum(width) for width in widths], widths))


def merge_slices(name, slices, rules):
    """``(whole tensor, hints)`` of the slices of all tensor-parallel ranks, in rank order.

    The hints are what cutting the whole again needs; they go into its file beside ``param``. Raises ValueError when
    replicas differ or shapes do not fit.
    """
    if rules.lists(keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS, name):
        dim, table = rules.tables[name]
        return join(slices, dim, cut_of_table(table)), {keys.CAT_DIM: dim}
    # Every rule is asked, so that the patterns of a single rank count as used.
    listed, sub = [rules.lists(key, name) for key in _PATTERN_KEYS], rules.sub_param(name)
    replicated, averaged, row, vocabulary, halves = listed
    if replicated:
        for rank, other in enumerate(slices[1:], 1):
            if not torch.equal(slices[0], other):
                raise ValueError(
                    f"parameter '{name}' matches {keys.TP_REPLICATED_PARAMETER_PATTERNS}, but tensor-parallel ranks 0 "
                    f"and {rank} have different values: correct the patterns of {keys.UNIVERSAL_CHECKPOINT_INFO}"
                )
        return slices[0], {}
    if averaged:
        return (slices[0] if len(slices) == 1 else torch.stack(slices).mean(dim=0)), {}
    if halves:
        return join_parts(slices, 0, 2), {keys.CAT_DIM: 0, keys.PARAM_N_SUB_PARAMS: 2}
    if sub is not None:
        # For each sub-parameter the sizes of the ranks' slices of it, or None where they are equal.
        widths = (rules.info.get(keys.SUB_PARAM_SHARD_WIDTHS) or {}).get(name)
        whole = _merge_sub_params(name, slices, sub, widths)
        return whole, {keys.CAT_DIM: sub.partition_dim, keys.SUB_PARAM_SHAPE: sub}
    dim = 1 if row and slices[0].dim() > 1 else 0
    whole = slices[0] if len(slices) == 1 or not slices[0].dim() else torch.cat(slices, dim=dim)
    if not vocabulary:
        return whole, {keys.CAT_DIM: dim}
    return whole[: rules.info.get(keys.ORIGINAL_VOCAB_SIZE)], {keys.CAT_DIM: dim, keys.VOCAB_TENSOR: True}


def _merge_sub_params(name, slices, sub, widths):
    sizes, whole = sub_sizes(sub.shape, sub.partition_dim)
    dim, count = sub.partition_dim, len(slices)
    if widths:
        cut = cut_of_widths([sum(width) for width in widths], widths)
    else:
        cut = even_cut(sizes, count, f"parameter '{name}'")
    views = []
    for rank, piece in enumerate(slices):
        shape = list(whole)
        shape[dim] = cut.width(rank)
        if -1 in shape:
            shape[shape.index(-1)] = -(piece.numel() // torch.Size(shape).numel())
        if torch.Size(shape).numel() != piece.numel():
            raise ValueError(
                f"parameter '{name}' of tensor-parallel rank {rank} has {piece.numel()} elements, the entry of "
                f"{keys.PARAMETER_WITH_SUB_PARAMS} that it matches gives {tuple(shape)}"
            )
        views.append(piece.reshape(shape))
    joined = join(views, dim, cut)
    # The module may keep it in fewer dimensions than the table has.
    fits = slices[0].dim() == len(whole)
    return joined if fits else joined.reshape(-1, *slices[0].shape[1:])


def local_slice(name, file, full, shape, rank, count, origin="the universal checkpoint"):
    """The slice of a whole parameter that tensor-parallel rank ``rank`` of ``count`` has; ``shape``: its module's.

    ``file``: the content of the parameter's file, for the hints in it. Words beyond the vocabulary are zeros. Raises
    ValueError where the slice does not have that shape.
    """
    shape = torch.Size(shape)
    if full.shape == shape:
        return full
    if file.get(keys.VOCAB_TENSOR):
        full = _pad_words(
            name, full, shape[0] * (count if full.dim() == 1 or full.shape[1:] == shape[1:] else 1), origin
        )
    sub = file.get(keys.SUB_PARAM_SHAPE)
    if full.numel() == shape.numel() and (sub is not None or full.dim() == 1):
        return full.reshape(shape)
    piece, parts, what = full, file.get(keys.PARAM_N_SUB_PARAMS, 1), f"parameter '{name}'"
    if sub is not None:
        sizes, whole = sub_sizes(sub.shape, sub.partition_dim)
        piece = narrow(full.reshape(whole), sub.partition_dim, even_cut(sizes, count, what), rank)
    elif parts > 1 or keys.CAT_DIM in file:  # replicas and averages are whole on every rank
        dim = file.get(keys.CAT_DIM, 0)
        piece = narrow(full, dim, even_cut(equal_parts(full.shape[dim], parts), count, what), rank)
    if piece.numel() != shape.numel() if sub is not None else piece.shape != shape:
        raise ValueError(
            f"parameter '{name}' has shape {tuple(full.shape)} in {origin}, which gives "
            f"{tuple(piece.shape)} to one of {count} tensor-parallel rank(s); this model has {tuple(shape)}: it is "
            "another model"
        )
    return piece.reshape(shape)


def _pad_words(name, full, rows, origin):
    more = rows - full.shape[0]
    if more < 0:
        raise ValueError(f"parameter '{name}' has {full.shape[0]} words in {origin}, this model has room for {rows}")
    return torch.cat([full, full.new_zeros(more, *full.shape[1:])]) if more else full


class Cut(collections.namedtuple("Cut", "shape dim parts own", defaults=(None, 1, None))):
    """The form that a parameter has in this run's model. ``shape``: a torch.Size, on this rank; ``dim``: the dimension
    that tensor parallelism cuts (None: each rank has all of it; -1: it is cut, and was not said where), of ``parts``
    side by side. ``own``: the ``ParamCut`` of a parameter that automatic tensor parallelism has cut."""

    @classmethod
    def of(cls, param, shape):
        """By the mark of automatic tensor parallelism, or the attributes that Megatron gives parameters."""
        own = cut_of(param)
        if own is not None:
            return cls(shape, own.dim, own=own)
        if not (getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False)):
            return cls(shape)
        return cls(shape, getattr(param, "partition_dim", -1), max(getattr(param, "partition_stride", 1), 1))

    @property
    def whole(self):
        """The shape of the whole parameter; None where that is not known."""
        if self.own is not None:
            return self.own.whole_shape(self.shape)
        return self.shape if self.dim is None else None

    @property
    def table(self):
        return None if self.own is None else self.own.table()

    def take(self, name, hints, full, rank, count, origin):
        """This rank's part of the whole tensor ``full``; see ``local_slice``."""
        if self.own is None:
            return local_slice(name, hints, full, self.shape, rank, count, origin)
        if full.shape != self.whole:
            raise ValueError(
                f"parameter '{name}' has shape {tuple(full.shape)} in {origin}, and the whole parameter of this model "
                f"has {tuple(self.whole)}: it is another model"
            )
        return self.own.own(full)


# ---- saved universal -----------------------------------------------------------------------------------------------


class UniversalState(SavedState):
    """``folder``: of the universal checkpoint. ``shapes`` (name -> torch.Size) are those of this run's parameters,
    which under tensor parallelism are slices; ``mp_rank`` of ``mp_size`` is this rank. ``group_names``: the names of
    the parameters of each group of this run's optimizer, for model files that do not say them or are of another grid.
    ``cuts``: name -> ``Cut`` of this run's parameters.
    """

    masters_only = True

    def __init__(self, folder, mp_rank=0, mp_size=1, dp_rank=0, group_names=(), shapes=None, cuts=None):
        self.model_path = _model_path(folder, mp_rank, dp_rank)
        super().__init__(storage.read(self.model_path, lazy=True), folder)
        self.aliases = self.aliases or _aliases_of_first(folder)
        self.dp_world_size = self.model.get("dp_world_size", 1)
        self._rank, self._count, self._cuts = mp_rank, mp_size, dict(cuts or {})
        self._local = {**{name: cut.shape for name, cut in self._cuts.items()}, **(shapes or {})}
        self._opened, self._kinds = Latest(), {}
        self._all = {entry.name for entry in os.scandir(os.path.join(folder, ZERO_FOLDER)) if entry.is_dir()}
        path = os.path.join(folder, ZERO_FOLDER, OPTIMIZER_STATE)
        common = storage.read(path) if os.path.exists(path) else {}
        self.extra = {key: common[key] for key in EXTRA_KEYS if key in common}
        stage = common.get(keys.ZERO_STAGE, 1)
        self.zero_stage = int(getattr(stage, "value", stage))
        frozen = self.model.get(keys.FROZEN_PARAM_SHAPES) or {}
        groups = [
            [name for name in group if name in self._all and name not in frozen]
            for group in self._names_of_groups(group_names)
        ]
        self.param_groups = with_names(common.get(keys.PARAM_GROUPS), groups)
        self.shapes = {name: self._shape(name) for group in groups for name in group}
        self.frozen_shapes = {name: self._shape(name) for name in sorted(self._all - self.shapes.keys())}

    def _names_of_groups(self, wanted):
        """Those of the model file, unless this run has parameters that a rank of another grid has saved."""
        saved = self.model.get(keys.PARAM_SHAPES) or []
        known = {name for group in saved for name in group}
        other_grid = any(name in self._all and name not in known for group in wanted for name in group)
        return wanted if other_grid or not saved else saved

    def _file(self, name, state):
        """Content of a file, tensors lazy; the last one stays open for the pieces that follow."""
        path = self._path(name, state)
        return self._opened.value(path, lambda: _read_file(path))

    def _path(self, name, state):
        return path_below(self.folder, f"{ZERO_FOLDER}/{name}/{state}.pt", f"the folder {self.folder}")

    def _shape(self, name):
        """The shape that this run has of a parameter."""
        found = self._local.get(name)
        return torch.Size(self._file(name, keys.FP32_WEIGHT_KEY)[keys.PARAM].shape if found is None else found)

    def module(self):
        masters = self._all | {alias for alias, name in self.aliases.items() if name in self._all}
        return {name: value for name, value in super().module().items() if name not in masters}

    @functools.cached_property
    def _states(self):
        """name -> ``(states with a value for each element, others)`` of a parameter, the master left out."""
        found = {}
        for name in self.shapes:
            files = map(os.path.splitext, sorted(os.listdir(os.path.join(self.folder, ZERO_FOLDER, name))))
            states = [state for state, kind in files if kind == ".pt" and state not in (keys.FP32_WEIGHT_KEY, STEP)]
            whole = [state for state in states if self._has_elements(name, state)]
            found[name] = whole, [state for state in states if state not in whole]
        return found

    def _has_elements(self, name, state):
        """Whether a state has a value for each element. Asked of one file for each kind: there may be thousands."""
        if not self.shapes[name]:  # of a parameter without dimensions nothing tells
            return self._kinds.get(state, True)
        if state not in self._kinds:
            self._kinds[state] = len(self._file(name, state)[keys.PARAM].shape) > 0
        return self._kinds[state]

    def state_names(self):
        return list(dict.fromkeys(state for whole, _ in self._states.values() for state in whole))

    def scalars(self, name):
        found = {state: eager(self._file(name, state)[keys.PARAM]) for state in self._states[name][1]}
        path = self._path(name, STEP)
        return {**found, STEP: storage.read(path)} if os.path.exists(path) else found

    def state_pieces(self, name, kind):
        known = kind == keys.FP32_WEIGHT_KEY or kind in self._states[name][0]
        return self._whole(name, kind, self.shapes[name]) if known else []

    def frozen_pieces(self, name):
        return self._whole(name, keys.FP32_WEIGHT_KEY, self.frozen_shapes[name]) if name in self.frozen_shapes else []

    def _whole(self, name, state, shape):
        return [(0, shape.numel(), Range(functools.partial(self._part, name, state, shape)))] if shape.numel() else []

    def _part(self, name, state, shape):
        """The part of a whole tensor that this rank's module has; the lazy tensor where that is the whole."""
        file = self._file(name, state)
        value = file[keys.PARAM]
        if torch.Size(value.shape) != shape:  # once for all ranges
            cut = self._cuts.get(name) or Cut(shape)
            where = f"the universal checkpoint {self.folder}"
            value = file[keys.PARAM] = cut.take(name, file, eager(value), self._rank, self._count, where)
        return value


def _read_file(path):
    """Content of the file of a parameter or of one of its states; tensors are lazy."""
    found = storage.read(path, lazy=True)
    found = found if isinstance(found, dict) else {keys.PARAM: found}
    if not hasattr(found.get(keys.PARAM), "shape"):
        raise RuntimeError(f"{path} is damaged: it has no tensor '{keys.PARAM}'; convert the checkpoint anew")
    return found


def _aliases_of_first(folder):
    """Only the first rank's file says them in files of others."""
    path = names.SHARDED_MODEL_STATES.path(folder, dp_rank=0)
    return (storage.read(path, lazy=True).get("shared_params") if os.path.exists(path) else None) or {}


def _model_path(folder, mp_rank, dp_rank):
    """The model file for a rank: its own, or the first one there is, when fewer ranks have saved."""
    paths = [
        names.SHARDED_MODEL_STATES.path(folder, dp_rank=dp_rank, mp_rank=mp_rank),
        names.MODEL_STATES.path(folder, mp_rank=mp_rank),
        names.SHARDED_MODEL_STATES.path(folder, dp_rank=0, mp_rank=mp_rank),
        names.SHARDED_MODEL_STATES.path(folder, dp_rank=0),
    ]
    return next(filter(os.path.exists, paths), names.MODEL_STATES.path(folder))
