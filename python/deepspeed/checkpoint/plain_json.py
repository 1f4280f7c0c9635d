"""Values of Python as JSON, exactly: what comes back equals what went in, type included. Tensors go elsewhere.

Text, numbers, booleans, None, lists and dicts with text keys are themselves; anything else is a dict with one key that
starts with ``$`` and names the type. Nothing that is read can run code.
"""

import base64
import collections
import datetime
import pathlib

import numpy
import torch

_MAPPINGS = {"odict": collections.OrderedDict, "counter": collections.Counter}
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size, "deque": collections.deque}


class NotPlain(TypeError):
    """A value that only a pickle could hold."""


def encode(value, tensors, where="client_state"):
    """What ``json.dumps`` takes. Tensors and arrays of ``value`` are added to the dict ``tensors`` under the place they
    have in it. Raises ``NotPlain``, which names that place."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[where] = value.detach()
        return {"$tensor": where}
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        tensors[where] = torch.from_numpy(numpy.ascontiguousarray(value))
        return {"$array": [where, value.dtype.str, list(value.shape)]}
    if isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return {"$scalar": [value.dtype.str, value.item()]}
    if kind is list:
        return [encode(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
    if kind is dict or kind in _MAPPINGS.values():
        name = next((name for name, known in _MAPPINGS.items() if known is kind), "dict")
        pairs = [
            [encode(key, tensors, f"{where}.key{i}"), encode(item, tensors, f"{where}.{key}")]
            for i, (key, item) in enumerate(value.items())
        ]
        return {f"${name}": pairs}
    for name, known in _SEQUENCES.items():
        if kind is known:
            return {f"${name}": [encode(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"$complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, pathlib.PurePath):
        return {"$path": str(value)}
    if kind is datetime.datetime:
        return {"$datetime": value.isoformat()}
    raise NotPlain(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint without pickles cannot hold: pass "
        'plain values or tensors, or set "checkpoint": {"writer": {"format": "torch"}}'
    )


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
        found = tensors[place]
        found = found.read() if hasattr(found, "read") else found
        return found.numpy().view(numpy.dtype(dtype)).reshape(shape).copy()
    if name == "scalar":
        return numpy.dtype(inner[0]).type(inner[1])
    if name == "dict":
        return {decode(key, tensors): decode(item, tensors) for key, item in inner}
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(key, tensors): decode(item, tensors) for key, item in inner})
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, tensors) for item in inner)
    if name == "bytes":
        return base64.b64decode(inner)
    if name == "complex":
        return complex(*inner)
    if name == "dtype" and isinstance(getattr(torch, inner, None), torch.dtype):
        return getattr(torch, inner)
    if name == "path":
        return pathlib.Path(inner)
    if name == "datetime":
        return datetime.datetime.fromisoformat(inner)
    raise ValueError(f"the checkpoint's JSON holds {tag!r}, which this library does not know: it is damaged or newer")
