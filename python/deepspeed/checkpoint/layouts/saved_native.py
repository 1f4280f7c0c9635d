"""The native format as a ``SavedState``: safetensors and JSON, whatever stage and number of ranks wrote them."""

import base64
import collections
import datetime
import functools
import json
import math
import os
import pathlib

import numpy
import torch

from deepspeed.checkpoint.constants import BUFFER_NAMES, FROZEN_PARAM_SHAPES, PARAM_SHAPES
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.names import MODULE, VALUES
from deepspeed.checkpoint.layouts.saved_named import pieces_of
from deepspeed.checkpoint.layouts.saved_state import SavedState, eager, plain
from deepspeed.formats.recorded_paths import path_below
from deepspeed.formats.safetensors_file import DamagedSafetensors, read_safetensors
from deepspeed.host.recorded_names import open_regular

# ---- plain json ----------------------------------------------------------------------------------------------------
# Values of Python as JSON, exactly: what comes back equals what went in, type included. Tensors go elsewhere. Text,
# numbers, booleans, None, lists and dicts with text keys are themselves; anything else is a dict with one key that
# starts with ``$`` and names the type. Nothing that is read can run code.

# The part of the key behind ``$`` -> the type. Values in these are encoded in turn.
_MAPPINGS = {"dict": dict, "odict": collections.OrderedDict, "counter": collections.Counter}
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size, "deque": collections.deque}


def _dtype_of(name):
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else _refuse_tag("$dtype")


def _refuse_tag(tag):
    raise ValueError(f"the checkpoint's JSON holds {tag!r}, which this library does not know: it is damaged or newer")


# The same -> (whether it is for a value, the JSON of the value, the value of the JSON).
_SIMPLE = {
    "float": (lambda value: type(value) is float, repr, float),  # JSON has no infinities and no NaN
    "scalar": (
        lambda value: isinstance(value, numpy.generic) and value.dtype.kind in "biuf",
        lambda value: [value.dtype.str, value.item()],
        lambda pair: numpy.dtype(pair[0]).type(pair[1]),
    ),
    "bytes": (
        lambda value: type(value) is bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode,
    ),
    "complex": (
        lambda value: type(value) is complex, lambda value: [value.real, value.imag], lambda pair: complex(*pair),
    ),
    "dtype": (
        lambda value: isinstance(value, torch.dtype), lambda value: str(value).removeprefix("torch."), _dtype_of,
    ),
    "path": (lambda value: isinstance(value, pathlib.PurePath), str, pathlib.Path),
    "datetime": (
        lambda value: type(value) is datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat,
    ),
}  # fmt: skip


class NotPlain(TypeError):
    """A value that only a pickle could hold."""


def encode(value, tensors, where="client_state"):
    """What ``json.dumps`` takes. Tensors and arrays of ``value`` are added to the dict ``tensors`` under the place they
    have in it. Raises ``NotPlain``, which names that place."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, torch.Tensor):
        return {"$tensor": _put(value.detach(), tensors, where)}
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"$array": [_put(_as_tensor(value), tensors, where), value.dtype.str, list(value.shape)]}
    if kind is list:
        return [encode(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
    for name, known in _MAPPINGS.items():
        if kind is known:
            return {f"${name}": [
                [encode(key, tensors, f"{where}.key{i}"), encode(item, tensors, f"{where}.{key}")]
                for i, (key, item) in enumerate(value.items())
            ]}  # fmt: skip
    for name, known in _SEQUENCES.items():
        if kind is known:
            return {f"${name}": [encode(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]}
    for name, (fits, json_of, _) in _SIMPLE.items():
        if fits(value):
            return {f"${name}": json_of(value)}
    raise NotPlain(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint without pickles cannot hold: pass "
        'plain values or tensors, or set "checkpoint": {"writer": {"format": "torch"}}'
    )


def _put(tensor, tensors, where):
    """The place of ``tensor``: ``where``, unless keys with dots in them have brought another one there."""
    place, number = where, 1
    while place in tensors:
        number += 1
        place = f"{where}#{number}"
    tensors[place] = tensor
    return place


def _as_tensor(array):
    """Elements of an array as a tensor; their bytes where torch has no such type."""
    flat = numpy.ascontiguousarray(array)
    try:
        return torch.from_numpy(flat)
    except (TypeError, ValueError):
        return torch.from_numpy(flat.reshape(-1).view(numpy.uint8))


def decode(value, tensors):
    """Inverse of ``encode``: ``tensors`` maps places to tensors. Raises ValueError for what ``encode`` never makes."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    (tag, inner), *_ = value.items()
    name = tag[1:]
    if name == "tensor":
        return tensors[inner]
    if name == "array":
        place, dtype, shape = inner
        return eager(tensors[place]).numpy().reshape(-1).view(numpy.dtype(dtype)).reshape(shape).copy()
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(key, tensors): decode(item, tensors) for key, item in inner})
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, tensors) for item in inner)
    return _SIMPLE[name][2](inner) if name in _SIMPLE else _refuse_tag(tag)


# ---- saved native --------------------------------------------------------------------------------------------------


class NativeState(SavedState):
    """``folder``: of the tag. ``mp_rank``: of the model-parallel rank; ``dp_rank``: of this run, which gets its own
    buffers where it has saved some.

    Raises FileNotFoundError for a file that is missing, RuntimeError for one that is damaged or newer.
    """

    masters_only = True

    def __init__(self, folder, mp_rank=0, dp_rank=0):
        super().__init__()
        self.folder = folder
        self.model_path = os.path.join(folder, names.checkpoint_json(mp_rank))
        self._about = read_json(self.model_path)
        self.zero_stage, self.ranks = self._about["zero_stage"], self._about["ranks"]
        self.dp_world_size = len(self.ranks)
        self._dp_rank = dp_rank
        self._parameters = self._about["parameters"]
        self._shapes = {
            name: torch.Size(self._parameters[name]["shape"]) for group in self._named_groups() for name in group
        }
        self._frozen = {
            name: torch.Size(about["shape"]) for name, about in self._parameters.items() if not about["trained"]
        }
        self.model = self._model()

    # ---- files -----------------------------------------------------------------------------------------------------
    @functools.cached_property
    def _files(self):
        """``_RankFiles`` of the ranks that saved, in order."""
        return [_RankFiles(self.folder, rank) for rank in self.ranks]

    @functools.cached_property
    def _index(self):
        """kind -> name of a parameter -> ``[(offset, lazy tensor)]`` in order; of equal offsets the first rank's."""
        found = {}
        for files in self._files:
            for kind, name, offset, tensor in files.tensors:
                if kind != VALUES and name in self._parameters:
                    found.setdefault(kind, {}).setdefault(name, {}).setdefault(offset or 0, tensor)
        return {kind: {name: sorted(runs.items()) for name, runs in named.items()} for kind, named in found.items()}

    @functools.cached_property
    def _strides(self):
        return {name: stride for files in self._files for name, stride in files.about["strides"].items()}

    def _decode(self, value, place=0):
        """``place``: of the rank among those that saved, whose file has the tensors of ``value``. They stay lazy."""
        if not _holds_tensors(value):
            return decode(value, {})
        return decode(value, self._files[place].values)

    # ---- the model file --------------------------------------------------------------------------------------------
    def _model(self):
        about, module = self._about, self._about["module"]
        state = {
            **{key: plain(self._decode(value)) for key, value in about["engine"].items()},
            "module": _ModuleKeys(dict.fromkeys(module["keys"])),
            BUFFER_NAMES: module["buffers"],
            PARAM_SHAPES: [{name: self._shapes[name] for name in group} for group in self._named_groups()],
            FROZEN_PARAM_SHAPES: dict(self._frozen),
            "shared_params": dict(about["tied"]),
            "ds_config": about["ds_config"],
            **({names.PARAMS_BY_RANK: {"layers": {}}} if about.get("pipeline") else {}),
        }
        state["module"]._metadata = self._decode(module["metadata"])
        state.update(self._decode(about["client_state"]))
        return state

    @functools.cached_property
    def _whole(self):
        """name -> lazy tensor or value of all that is whole in the files: buffers, parameters that are not trained."""
        found = {name: plain(self._decode(value)) for name, value in self._about["module"]["values"].items()}
        places = [self._dp_rank] if self._dp_rank < len(self._files) else []
        for place in [*places, *range(len(self._files))]:  # this rank's own buffers before those of the first
            for kind, name, _, tensor in self._files[place].tensors:
                if kind == MODULE and name not in self._parameters:
                    found.setdefault(name, tensor)
        for name, runs in self._index.get(MODULE, {}).items():
            if name in self._frozen and tuple(runs[0][1].shape) == tuple(self._frozen[name]):
                found[name] = runs[0][1]
        for alias, name in self.aliases().items():
            if name in found:
                found[alias] = found[name]
        return found

    def module(self):
        keys = self.model["module"]
        return {name: self._whole[name] for name in keys if name in self._whole}

    def aliases(self):
        return dict(self._about["tied"])

    # ---- parameters ------------------------------------------------------------------------------------------------
    def _named_groups(self):
        return [group["names"] for group in self._about["groups"]]

    def shapes(self):
        return self._shapes

    def frozen_shapes(self):
        return self._frozen

    def weight_shape(self, name):
        return super().weight_shape(name) or self._frozen.get(name)

    def dtype(self, name):
        """torch.dtype of a parameter as the model computed with it."""
        return getattr(torch, self._parameters[name]["dtype"])

    def param_groups(self):
        return [
            {**plain(self._decode(group["options"])), "names": list(group["names"])} for group in self._about["groups"]
        ]

    def state_names(self):
        return sorted(kind for kind in self._index if kind not in names.RESERVED)

    @functools.cached_property
    def _scalars(self):
        found = {}
        for place, files in enumerate(self._files):
            for name, values in files.about["scalars"].items():
                if name not in found:
                    found[name] = self._decode(values, place)
        return found

    def scalars(self, name):
        step = self._parameters[name].get("step")
        return {"step": step} if step is not None else dict(self._scalars.get(name, {}))

    def state_pieces(self, name, kind):
        return self._pieces(self._index.get(kind, {}).get(name, []), name)

    def frozen_pieces(self, name):
        if name not in self._frozen:
            return []
        return self._pieces(self._index.get(MODULE, {}).get(name, []), name)

    def _pieces(self, runs, name):
        return pieces_of(runs, self._parameters[name]["shape"], self._strides.get(name))

    def extra(self):
        return plain(self._decode(self._about["optimizer"]))

    def run_states(self, rank):
        """``(what the rank with that global number saved to go on, or the first one, whether it is its own)``."""
        own = rank in self.ranks
        place = self.ranks.index(rank) if own else 0
        return plain(self._decode(self._files[place].about["run"], place)), own


class _ModuleKeys(dict):
    """Names of the module's state; a class of its own so that the versions of modules can be put on it."""


class _RankFiles:
    """What a rank has written: ``about`` (its JSON), ``tensors`` as (kind, name, offset, lazy tensor), ``values`` place
    -> lazy tensor."""

    def __init__(self, folder, rank):
        path = os.path.join(folder, names.rank_json(rank))
        self.about = read_json(path)
        self.tensors, self.values = [], {}
        for name in self.about["files"]:
            for key, tensor in _open(path_below(folder, name, path, "entry")).items():
                kind, known, offset = names.parsed(key)
                self.tensors.append((kind, known, offset, tensor))
                if kind == VALUES:
                    self.values[known] = tensor


def _open(path):
    try:
        return read_safetensors(path)[0]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"the checkpoint has no file {path}: it is incomplete; load an older tag") from error
    except (DamagedSafetensors, ValueError) as error:
        raise RuntimeError(f"the checkpoint file {path} is damaged ({error}); load an older tag") from error


def read_json(path):
    """A JSON file of the format. Raises FileNotFoundError, RuntimeError for one that is damaged or newer than us."""
    try:
        with open_regular(path) as file:
            found = json.loads(file.read().decode())
        known = found["format"] == names.FORMAT
        version = found["version"]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"the checkpoint has no file {path}: it is incomplete; load an older tag") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RuntimeError(f"the checkpoint file {path} is damaged ({error}); load an older tag") from error
    if not known or type(version) is not int:
        raise RuntimeError(f"the file {path} is of no checkpoint of this format: it says {found['format']!r}")
    if version > names.VERSION:
        raise RuntimeError(
            f"{path} has version {version} of the native format, this library knows up to {names.VERSION}: update it"
        )
    return found


def _holds_tensors(value):
    if isinstance(value, dict):
        return "$tensor" in value or "$array" in value or any(_holds_tensors(item) for item in value.values())
    return isinstance(value, list) and any(_holds_tensors(item) for item in value)
