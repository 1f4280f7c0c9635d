"""What a checkpoint's pickle may name: torch's tensors, numpy's arrays and the few records of DeepSpeed's own."""

import contextlib
import enum
import importlib
import math
import pickle
import sys
import uuid

import torch

from deepspeed.utils.lazy_tensor import LazyTensor
from deepspeed.utils.pickle_table import PLAIN_RULES, RECORD, Table, Word, need

try:
    import numpy
except ImportError:  # torch runs without it
    numpy = None

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
}
_ENUMS = {
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): (
        int,
        {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3},
    ),
    ("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum"): (
        str,
        {name: name for name in ("none", "cpu", "nvme")},
    ),
    ("deepspeed.runtime.zero.offload_config", "OffloadStateTypeEnum"): (
        str,
        {n: n for n in ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")},
    ),
    ("deepspeed.utils.types", "ActivationFuncType"): (
        int,
        {"UNKNOWN": 0, "GELU": 1, "ReLU": 2, "GATED_GELU": 3, "GATED_SILU": 4},
    ),
}
_RECORDS = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
_ALSO_KNOWN_AS = {"deepspeed.runtime.zero.config": "deepspeed.config.sections",
                  "deepspeed.runtime.zero.offload_config": "deepspeed.config.sections",
                  "deepspeed.runtime.fp16.loss_scaler": "deepspeed.optim.loss_scaler"}  # fmt: skip
_INERT = {}


class StorageType:
    """Stands for a storage class of torch in a pickle: such classes differ between versions, and none is needed."""

    def __init__(self, name, dtype):
        self.name, self.dtype = f"torch.{name}", dtype


def _published(module, name):
    """A class of DeepSpeed by its published path; without DeepSpeed in this process, a record with the same fields."""
    if "deepspeed" in sys.modules and hasattr(sys.modules["deepspeed"], "initialize"):
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            return found
    if (module, name) not in _INERT:
        kind, members = _ENUMS.get((module, name), (object, None))
        _INERT[module, name] = (
            type(name, (), {"__module__": module})
            if members is None
            else enum.Enum(name, members, module=module, type=kind)
        )
    return _INERT[module, name]


def _numbers(values, what):
    need(isinstance(values, (tuple, list)) and all(type(v) is int for v in values), f"{what} that are no integers")
    return tuple(values)


def _size(*arguments):
    return torch.Size(_numbers(arguments[0], "sizes") if arguments else ())


def _device(*arguments):
    need(all(type(a) in (str, int) for a in arguments), "a device of something else")
    return torch.device(*arguments)


def _layout(name):
    found = getattr(torch, name.rpartition(".")[2], None) if type(name) is str else None
    need(isinstance(found, (torch.layout, torch.memory_format)), f"a layout {name!r}")
    return found


class TensorRules:
    """The rules of one file. ``lazy``: tensors stay in the file."""

    def __init__(self, lazy):
        self.lazy = lazy

    # ---- tensors -----------------------------------------------------------------------------------------------------
    def tensor(self, memory, offset, size, stride, requires_grad=False, hooks=None, metadata=None):
        need(type(memory).__name__ == "StoredMemory", "a tensor without a storage")
        need(type(offset) is int and not hooks, "a tensor with hooks")
        found = LazyTensor(memory, offset, _numbers(size, "sizes"), _numbers(stride, "strides"), bool(requires_grad))
        if self.lazy:
            return found
        return found.share().requires_grad_(bool(requires_grad))

    def tensor_v3(self, memory, offset, size, stride, requires_grad, hooks, dtype, metadata=None):
        need(isinstance(dtype, torch.dtype), "a tensor without a dtype")
        need(type(memory).__name__ == "StoredMemory", "a tensor without a storage")
        return self.tensor(memory.viewed_as(dtype), offset, size, stride, requires_grad, hooks)

    def tensor_v1(self, memory, offset, size, stride):
        return self.tensor(memory, offset, size, stride)

    def from_type(self, function, cls, arguments, state):
        need(type(function) is Word and type(arguments) is tuple, "a tensor of no kind")
        rule = {"_rebuild_tensor_v2": self.tensor, "_rebuild_tensor_v3": self.tensor_v3,
                "_rebuild_parameter": self.parameter}.get(function.name.rpartition(".")[2])  # fmt: skip
        need(rule is not None, "a tensor of no kind")
        need(cls in (torch.Tensor, torch.nn.Parameter), f"a tensor of the class {cls!r}")
        found = rule(*arguments)
        return self.parameter(found, found.requires_grad, None) if cls is torch.nn.Parameter else found

    def parameter(self, data, requires_grad, hooks=None):
        need(not hooks, "a parameter with hooks")
        if self.lazy:
            need(isinstance(data, LazyTensor), "a parameter of something else")
            data.requires_grad = bool(requires_grad)
            return data
        need(type(data) in (torch.Tensor, torch.nn.Parameter), "a parameter of something else")
        return torch.nn.Parameter(data.detach(), requires_grad=bool(requires_grad))

    def parameter_with_state(self, data, requires_grad, hooks, state):
        return self.parameter(data, requires_grad, hooks)

    def sparse(self, layout, data):
        need(layout is torch.sparse_coo and type(data) is tuple and len(data) >= 3, "a sparse tensor of this layout")
        indices, values = (t.read() if isinstance(t, LazyTensor) else t for t in data[:2])
        need(torch.is_tensor(indices) and torch.is_tensor(values), "a sparse tensor of something else")
        size = _size(data[2])
        need(math.prod(size) < 1 << 63, "a sparse tensor of this size")
        with getattr(torch.sparse, "check_sparse_tensor_invariants", contextlib.nullcontext)():  # 1.13 always checks
            return torch.sparse_coo_tensor(indices, values, size)

    def generator(self, *arguments):
        return torch.Generator(*(_device(a) if type(a) is str else a for a in arguments))

    def set_generator(self, generator, state):
        need(type(state) is tuple and len(state) == 3, "the state of a generator")
        value = state[2].read() if isinstance(state[2], LazyTensor) else state[2]
        need(torch.is_tensor(value) and value.dtype == torch.uint8, "the state of a generator")
        generator.set_state(value)

    def tensor_functions(self):
        """{(module, name): function} for a machine that trusts the file, with storages as here."""
        found = {path: rule for path, (value, rule) in self.rules().items() if type(value) is Word}
        found = {path: rule for path, rule in found.items() if path[0].startswith("torch._")}
        found["torch._tensor", "_rebuild_from_type_v2"] = self.from_trusted_type
        found.update({path: value for path, (value, _) in self.rules().items() if type(value) is StorageType})
        return found

    def from_trusted_type(self, rule, cls, arguments, state):
        found = rule(*arguments)
        if self.lazy or cls is torch.Tensor:
            return found
        found = found.as_subclass(cls) if type(found) is not cls else found
        for name, value in (state if type(state) is dict else {}).items():
            setattr(found, name, value)
        return found

    # ---- all of them -------------------------------------------------------------------------------------------------
    def rules(self):
        """{(module, name): (value, rule)}"""
        found = dict(PLAIN_RULES)
        for name, rule in (
            ("_rebuild_tensor", self.tensor_v1),
            ("_rebuild_tensor_v2", self.tensor),
            ("_rebuild_tensor_v3", self.tensor_v3),
            ("_rebuild_parameter", self.parameter),
            ("_rebuild_parameter_with_state", self.parameter_with_state),
            ("_rebuild_sparse_tensor", self.sparse),
        ):
            found["torch._utils", name] = Word(f"torch._utils.{name}"), rule
        found["torch._tensor", "_rebuild_from_type_v2"] = Word("torch._tensor._rebuild_from_type_v2"), self.from_type
        found["torch.serialization", "_get_layout"] = Word("torch.serialization._get_layout"), _layout
        found["torch", "Tensor"] = torch.Tensor, None
        for module in ("torch.nn.parameter", "torch.nn"):
            found[module, "Parameter"] = torch.nn.Parameter, None
        found["torch", "Size"] = torch.Size, _size
        found["torch", "device"] = torch.device, _device
        for module in ("torch", "torch._C"):
            found[module, "Generator"] = torch.Generator, self.generator
        for name, dtype in _STORAGES.items():
            for module in ("torch", "torch.storage", "torch.cuda"):
                found[module, name] = StorageType(name, dtype), None
        found["torch.storage", "_UntypedStorage"] = found["torch.storage", "UntypedStorage"]
        found.update({("torch", name): (value, None) for name, value in _DTYPES.items()})
        found.update(_NUMPY)
        for path in _RECORDS:
            found[path] = _published(*path), RECORD
        for path in _ENUMS:
            found[path] = _published(*path), None
        for published, own in _ALSO_KNOWN_AS.items():
            for (module, name), entry in list(found.items()):
                if module == published:
                    found[own, name] = entry
        return found


# ---- numpy ---------------------------------------------------------------------------------------------------------
def _dtype(text, align=False, copy=True):
    need(type(text) is str and len(text) < 64, "a dtype of something else")
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


def _empty_array(cls, shape, kind):
    need(cls is numpy.ndarray and shape == (0,), "an array of another class")
    return numpy.ndarray((0,), numpy.int8)


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
    need(type(data) in (bytes, bytearray) and order in ("C", "F"), "an array of something else")
    _checked_shape(shape, _plain_dtype(dtype), len(data))
    return numpy.frombuffer(data, dtype).reshape(shape, order=order).copy(order)


def _scalar(dtype, data):
    data = data.encode("latin-1") if type(data) is str else data
    need(type(data) is bytes, "a number of objects")
    _checked_shape((), _plain_dtype(dtype), len(data))
    return numpy.frombuffer(data, dtype)[0]


def _numpy_rules():
    reconstruct, scalar, frombuffer = (
        Word(f"numpy.core.multiarray.{name}") for name in ("_reconstruct", "scalar", "_frombuffer")
    )
    found = {("numpy", "ndarray"): (numpy.ndarray, None), ("numpy", "dtype"): (numpy.dtype, _dtype)}
    for core in ("numpy.core", "numpy._core"):
        found[f"{core}.multiarray", "_reconstruct"] = reconstruct, _empty_array
        found[f"{core}.multiarray", "scalar"] = scalar, _scalar
        found[f"{core}.numeric", "_frombuffer"] = frombuffer, _from_buffer
    for name, value in vars(numpy).items():
        if isinstance(value, type) and issubclass(value, numpy.generic) and value is not numpy.object_:
            found["numpy", name] = value, None
    return found


_NUMPY = _numpy_rules() if numpy is not None else {}
_DTYPES = {name: value for name, value in vars(torch).items()
           if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))}  # fmt: skip


def table_of(path, lazy, allow=()):
    """The rules for the file at ``path``."""
    rules = TensorRules(lazy)
    found = Table(path, rules.rules(), allow)
    found.builds[torch.Generator] = rules.set_generator
    found.builds[uuid.UUID] = _build_uuid
    if numpy is not None:
        found.builds[numpy.ndarray] = _build_array
        for cls in {type(numpy.dtype(code)) for code in "?bhilqBHILQefdgFDGSU"}:
            found.builds[cls] = _build_dtype
    return found


def _build_uuid(value, state):
    need(type(state) is dict and type(state.get("int")) is int and 0 <= state["int"] < 1 << 128, "a UUID's state")
    object.__setattr__(value, "int", state["int"])
    object.__setattr__(value, "is_safe", uuid.SafeUUID.unknown)


def persistent_storage(memory_of):
    """A function for the machine: persistent ids of torch.save, ('storage', type, key, location, numel)."""

    def find(pid):
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] not in ("storage", b"storage"):
            raise pickle.UnpicklingError("a persistent id that is no storage")
        kind, key, location, numel = pid[1:5]
        if type(kind) is not StorageType or type(key) is not str or type(location) is not str or type(numel) is not int:
            raise pickle.UnpicklingError("a storage of another kind")
        if location == "meta" or numel < 0 or (len(pid) == 6 and pid[5] is not None):
            raise pickle.UnpicklingError(f"the storage {key!r} has no values")
        return memory_of(key, kind.dtype, numel)

    return find
