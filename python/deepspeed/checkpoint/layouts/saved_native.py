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
from deepspeed.checkpoint.layouts import names, storage
from deepspeed.checkpoint.layouts.names import MODULE, VALUES
from deepspeed.checkpoint.layouts.saved_named import ByName
from deepspeed.checkpoint.layouts.saved_state import eager, plain, with_names
from deepspeed.formats.recorded_paths import path_below
from deepspeed.formats.safetensors_file import read_safetensors
from deepspeed.formats.torch_archive import DTYPES
from deepspeed.host.recorded_names import open_regular

# ---- plain json ----------------------------------------------------------------------------------------------------
# Values of Python as JSON, exactly: what comes back equals what went in, type included. Tensors go elsewhere. Text,
# numbers, booleans, None, lists and dicts with text keys are themselves; anything else is a dict with one key that
# starts with ``$`` and names the type. Nothing that is read can run code.

# The type -> the part of the key behind ``$``. Values in these are encoded in turn.
_MAPPINGS = {dict: "dict", collections.OrderedDict: "odict", collections.Counter: "counter"}
_SEQUENCES = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size", collections.deque: "deque"}
_KINDS = {name: kind for kind, name in {**_MAPPINGS, **_SEQUENCES}.items()}


def _refuse_tag(tag):
    raise ValueError(f"the checkpoint's JSON holds {tag!r}, which this library does not know: it is damaged or newer")


# The part of the key -> (whether it is for a value, the JSON of the value, the value of the JSON).
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
        lambda value: isinstance(value, torch.dtype), lambda value: str(value).removeprefix("torch."),
        lambda name: DTYPES.get(name) or _refuse_tag("$dtype"),
    ),
    "path": (lambda value: isinstance(value, pathlib.PurePath), str, pathlib.Path),
    "datetime": (
        lambda value: type(value) is datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat,
    ),
}  # fmt: skip


class NotPlain(TypeError):
    """A value that only a pickle could hold."""


def encode(value, tensors, where="client_state"):
    """``value`` in a form that ``json.dumps`` takes. Tensors and arrays in it are added to the dict ``tensors`` under
    their path in it. Raises ``NotPlain``, which names that path."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, torch.Tensor):
        return {"$tensor": _put(value.detach(), tensors, where)}
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"$array": [_put(_as_tensor(value), tensors, where), value.dtype.str, list(value.shape)]}
    if kind is list or kind in _SEQUENCES:
        items = [encode(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]
        return items if kind is list else {f"${_SEQUENCES[kind]}": items}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
    if kind in _MAPPINGS:
        return {f"${_MAPPINGS[kind]}": [
            [encode(key, tensors, f"{where}.key{i}"), encode(item, tensors, f"{where}.{key}")]
            for i, (key, item) in enumerate(value.items())
        ]}  # fmt: skip
    for name, (fits, json_of, _) in _SIMPLE.items():
        if fits(value):
            return {f"${name}": json_of(value)}
    raise NotPlain(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint without pickles cannot hold: pass "
        'plain values or tensors, or set "checkpoint": {"writer": {"format": "torch"}}'
    )


def _put(tensor, tensors, where):
    """The key of ``tensor``: ``where``, with a number behind it if keys with dots have given it to another one."""
    key, number = where, 1
    while key in tensors:
        number += 1
        key = f"{where}#{number}"
    tensors[key] = tensor
    return key


def _as_tensor(array):
    """Elements of an array as a tensor; their bytes where torch has no such type."""
    flat = numpy.ascontiguousarray(array)
    try:
        return torch.from_numpy(flat)
    except (TypeError, ValueError):
        return torch.from_numpy(flat.reshape(-1).view(numpy.uint8))


def decode(value, tensor_of):
    """Inverse of ``encode``: ``tensor_of(key)`` gives the tensors. Raises ValueError for what ``encode`` never
    makes."""
    if isinstance(value, list):
        return [decode(item, tensor_of) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item, tensor_of) for key, item in value.items()}
    (tag, inner), *_ = value.items()
    name = tag[1:]
    if name == "tensor":
        return tensor_of(inner)
    if name == "array":
        key, dtype, shape = inner
        return eager(tensor_of(key)).numpy().reshape(-1).view(numpy.dtype(dtype)).reshape(shape).copy()
    kind = _KINDS.get(name)
    if kind in _MAPPINGS:
        return kind({decode(key, tensor_of): decode(item, tensor_of) for key, item in inner})
    if kind in _SEQUENCES:
        return kind(decode(item, tensor_of) for item in inner)
    return _SIMPLE[name][2](inner) if name in _SIMPLE else _refuse_tag(tag)


# ---- saved native --------------------------------------------------------------------------------------------------


class NativeState(ByName):
    """``folder``: of the tag. ``mp_rank``: of the model-parallel rank; ``dp_rank``: of this run, which gets its own
    buffers where it has saved some.

    Raises FileNotFoundError for a file that is missing, RuntimeError for one that is damaged or newer.
    """

    masters_only = True

    def __init__(self, folder, mp_rank=0, dp_rank=0):
        self.model_path = os.path.join(folder, names.checkpoint_json(mp_rank))
        about = self._about = read_json(self.model_path)
        self.folder, self._dp_rank, self._parameters = folder, dp_rank, about["parameters"]
        self._beside = about.get("beside") or {"parameters": (), "ranks": ()}
        self.zero_stage, self.ranks = about["zero_stage"], about["ranks"]
        self.dp_world_size = len(self.ranks)
        shapes = {name: torch.Size(one["shape"]) for name, one in self._parameters.items()}
        trained = [{name: shapes[name] for name in group["names"]} for group in about["groups"]]
        frozen = {name: shape for name, shape in shapes.items() if not self._parameters[name]["trained"]}
        super().__init__(self._model(trained, frozen), folder)
        self.shapes = {name: shape for group in trained for name, shape in group.items()}
        self.frozen_shapes, self.aliases = frozen, about["tied"]
        options = [plain(self._decode(group["options"])) for group in about["groups"]]
        self.param_groups = with_names(options, [group["names"] for group in about["groups"]])
        self.extra = plain(self._decode(about["optimizer"]))

    @functools.cached_property
    def _files(self):
        """The content of each rank's files, in order (``_part``)."""
        return [_part(self.folder, rank, self._parameters) for rank in self.ranks]

    @functools.cached_property
    def _others(self):
        """The same of ranks that have other parts of the model; those of some parameters count (``_beside``)."""
        return [_part(self.folder, rank, self._parameters) for rank in self._beside["ranks"]]

    def _parts(self, name, kind=None):
        return [*self._files, *self._others] if name in self._beside["parameters"] else self._files

    def _decode(self, value, index=0):
        """``index``: the number, among the ranks that saved, of the rank whose file has the tensors of ``value``. They
        stay lazy."""
        return decode(value, lambda tensor: self._files[index]["values"][tensor])

    # ---- the model file --------------------------------------------------------------------------------------------
    def _model(self, trained, frozen):
        about, module = self._about, self._about["module"]
        names_in_module = collections.OrderedDict.fromkeys(module["keys"])  # as a module's own, which has versions
        names_in_module._metadata = self._decode(module["metadata"])
        return {
            **{key: plain(self._decode(value)) for key, value in about["engine"].items()},
            "module": names_in_module,
            BUFFER_NAMES: module["buffers"],
            PARAM_SHAPES: trained,
            FROZEN_PARAM_SHAPES: dict(frozen),
            "shared_params": dict(about["tied"]),
            "ds_config": about["ds_config"],
            **({names.PARAMS_BY_RANK: {"layers": {}}} if about.get("pipeline") else {}),
            **self._decode(about["client_state"]),
        }

    @functools.cached_property
    def _whole(self):
        """name -> lazy tensor or value of all that is whole in the files: buffers, parameters that are not trained."""
        found = {name: plain(self._decode(value)) for name, value in self._about["module"]["values"].items()}
        own = self._files[self._dp_rank : self._dp_rank + 1]
        for part in [*own, *self._files]:  # this rank's own buffers before those of the first
            for name, runs in part["tensors"].get(MODULE, {}).items():
                if name not in self._parameters or runs[0][1].shape == self.frozen_shapes.get(name):
                    found.setdefault(name, runs[0][1])
        return {**found, **{alias: found[name] for alias, name in self.aliases.items() if name in found}}

    def module(self):
        return {name: self._whole[name] for name in self.model["module"] if name in self._whole}

    # ---- parameters ------------------------------------------------------------------------------------------------
    def state_names(self):
        return sorted({kind for part in self._files for kind in part["tensors"]}.difference(names.RESERVED))

    def frozen_pieces(self, name):
        return self._pieces(name, MODULE, self.frozen_shapes[name]) if name in self.frozen_shapes else []

    def run_states(self, rank):
        """``(what the rank with that global number saved to go on, or the first one, whether it is its own)``."""
        own = rank in self.ranks
        index = self.ranks.index(rank) if own else 0
        return plain(self._decode(self._files[index]["run"], index)), own


def _part(folder, rank, parameters):
    """The files of a rank in the form of ``OwnedStates.by_name``, with the state of its run (``run``) and tensors in
    values that are JSON otherwise (``values``: key -> lazy tensor)."""
    path = names.RANK_JSON.path(folder, rank=rank)
    about, tensors, values = read_json(path), {}, {}
    for entry in about["files"]:
        file = path_below(folder, entry, path, "entry")
        with storage.naming(file):
            found = read_safetensors(file)[0]
        for (kind, name, offset), tensor in zip(map(names.parsed, found), found.values()):
            if kind == VALUES:
                values[name] = tensor
            else:
                tensors.setdefault(kind, {}).setdefault(name, []).append((offset or 0, tensor))
    scalars = {name: decode(value, values.__getitem__) for name, value in about["scalars"].items()}
    return {**about, "parameters": parameters, "tensors": tensors, "scalars": scalars, "values": values}


def read_json(path):
    """A JSON file of the format. Raises FileNotFoundError, RuntimeError for one that is damaged or newer than us."""
    with storage.naming(path):
        with open_regular(path) as file:
            found = json.loads(file.read().decode())
        known, version = found["format"] == names.FORMAT, found["version"]
    if not known or type(version) is not int:
        raise RuntimeError(f"the file {path} is of no checkpoint of this format: it says {found['format']!r}")
    if version > names.VERSION:
        raise RuntimeError(
            f"{path} has version {version} of the native format, this library knows up to {names.VERSION}: update it"
        )
    return found
