"""Makers of the values for names in the table of ``csrc/formats`` that are not simply called: tensors, arrays,
generators.

The arguments have been looked at there; here is what only torch and numpy can tell.
"""

import contextlib
import math
import uuid

import torch

from deepspeed.formats.lazy_tensor import LazyTensor
from deepspeed.formats.plain_classes import member_of, need
from deepspeed.formats.standalone_reader import STORAGE_TYPES

try:
    import numpy
except ImportError:  # torch runs without it
    numpy = None


def _layout(name):
    found = getattr(torch, name.rpartition(".")[2], None)
    need(isinstance(found, (torch.layout, torch.memory_format)), f"a layout {name!r}")
    return found


def _sparse(layout, data):
    need(layout is torch.sparse_coo, "a sparse tensor of this layout")
    indices, values = (t.read() if isinstance(t, LazyTensor) else t for t in data[:2])
    with getattr(torch.sparse, "check_sparse_tensor_invariants", contextlib.nullcontext)():  # 1.13 always checks
        return torch.sparse_coo_tensor(indices, values, torch.Size(data[2]))


def _lazy_parameter(data, requires_grad):
    data.requires_grad = requires_grad
    return data


def _set_generator(generator, state):
    need(type(state) is tuple and len(state) == 3, "the state of a generator")
    value = state[2].read() if isinstance(state[2], LazyTensor) else state[2]
    need(torch.is_tensor(value) and value.dtype == torch.uint8, "the state of a generator")
    generator.set_state(value)


def _build_uuid(value, state):
    need(type(state) is dict and type(state.get("int")) is int and 0 <= state["int"] < 1 << 128, "a UUID's state")
    object.__setattr__(value, "int", state["int"])
    object.__setattr__(value, "is_safe", uuid.SafeUUID.unknown)


# ---- numpy ---------------------------------------------------------------------------------------------------------
def _dtype(text):
    return _plain_dtype(numpy.dtype(text, copy=True))  # of its own: it gets a state


def _plain_dtype(dtype):
    need(isinstance(dtype, numpy.dtype) and not dtype.hasobject and dtype.kind in "biufcSU", f"arrays of {dtype}")
    need(dtype.itemsize < 1 << 20, f"arrays of {dtype}")
    return dtype


def _build_dtype(dtype, state):
    need(type(state) is tuple and len(state) >= 5 and state[2:5] == (None, None, None), "a dtype of several fields")
    need(state[1] in ("<", ">", "=", "|"), "a dtype of no byte order")
    # Arrays that have the dtype already must not grow.
    need(len(state) == 8 and state[5] in (-1, dtype.itemsize), "a dtype of another size")
    dtype.__setstate__(state)


def _checked_shape(shape, dtype, size):
    need(
        type(shape) is tuple and len(shape) <= 32 and all(type(n) is int and n >= 0 for n in shape), "an array's shape"
    )
    need(math.prod(shape) * dtype.itemsize == size, f"an array of shape {shape} in {size} bytes")


def _build_array(array, state):
    need(type(state) is tuple and len(state) == 5, "an array's state")
    _, shape, dtype, fortran, data = state
    data = data.encode("latin-1") if type(data) is str else data
    need(type(data) in (bytes, bytearray), "an array of objects")
    _checked_shape(shape, _plain_dtype(dtype), len(data))
    need(array.shape == (0,) and array.base is None, "an array with two states")
    array.__setstate__((1, shape, dtype, bool(fortran), bytes(data)))


def _from_buffer(data, dtype, shape, order):
    need(order in ("C", "F"), "an array of something else")
    _checked_shape(shape, _plain_dtype(dtype), len(data))
    return numpy.frombuffer(data, dtype).reshape(shape, order=order).copy(order)


def _scalar(dtype, data):
    data = data.encode("latin-1") if type(data) is str else data
    _checked_shape((), _plain_dtype(dtype), len(data))
    return numpy.frombuffer(data, dtype)[0]


# ---- all of them ---------------------------------------------------------------------------------------------------
def values_of(lazy):
    """{"module.name": what a call of that name makes, where it is not the thing itself}"""
    arrays = {
        "multiarray._reconstruct": lambda: numpy.ndarray((0,), numpy.int8),
        "multiarray.scalar": _scalar,
        "numeric._frombuffer": _from_buffer,
    }
    return {
        **STORAGE_TYPES,  # when a file names one beside a tensor
        "builtins.getattr": lambda cls, name: cls.__members__[name],
        "uuid.UUID": lambda: object.__new__(uuid.UUID),
        "uuid.SafeUUID": lambda value: member_of(uuid.SafeUUID, value),
        "torch._utils._rebuild_parameter": _lazy_parameter if lazy else torch.nn.Parameter,
        "torch._utils._rebuild_sparse_tensor": _sparse,
        "torch.serialization._get_layout": _layout,
        "torch._C.Generator": torch.Generator,
        "numpy.dtype": _dtype,
        **{f"{core}.{name}": made for core in ("numpy.core", "numpy._core") for name, made in arrays.items()},
    }


# {class: function(value, state)} for what has a state of its own form.
STATE_RULES = {torch.Generator: _set_generator, uuid.UUID: _build_uuid}
if numpy is not None:
    STATE_RULES[numpy.ndarray] = _build_array
    STATE_RULES.update({type(numpy.dtype(code)): _build_dtype for code in "?bhilqBHILQefdgFDGSU"})
VALUES = {lazy: values_of(lazy) for lazy in (False, True)}
