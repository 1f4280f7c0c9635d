"""Files of torch.save, read by Python alone: for the script in checkpoint folders, which has no package beside it, and
for files that the user trusts.

Of a file that is not trusted it makes tensors and the plain data that consolidating weights asks for; other plain data
(dates, arrays, random states) become ``Unused``. Nothing that a file names is called. The package itself reads with
``csrc/formats``, which knows more classes and is faster; tests compare the two.
"""

import _compat_pickle
import collections
import errno
import io
import os
import pickle
import re
import struct
import sys
import zipfile

import torch

from deepspeed.formats.byte_ranges import DeflatedRange, FileRange, file_identity, read_bytes
from deepspeed.formats.lazy_tensor import LazyTensor, StoredMemory, itemsize

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_STORAGES = {"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
             "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16",
             "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
             "ComplexFloatStorage": "complex64", "UntypedStorage": "uint8", "_UntypedStorage": "uint8"}  # fmt: skip
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
_UNUSED = re.compile(
    r"builtins\.(bool|bytearray|bytes|complex|float|frozenset|int|list|object|range|set|slice|str|tuple|Ellipsis|"
    r"NotImplemented)|_codecs\.encode|"
    r"copyreg\._reconstructor|collections\.(deque|Counter)|datetime\.\w+|decimal\.Decimal|fractions\.Fraction|uuid\.(Safe)?UUID|"
    r"argparse\.Namespace|types\.SimpleNamespace|pathlib(\._local)?\.\w*Path|torch(\._C)?\.(device|Generator|Tensor)|"
    r"torch\.serialization\._get_layout|torch\._utils\._rebuild_sparse_tensor|torch\.nn(\.parameter)?\.Parameter|"
    r"numpy\.(ndarray|dtype|u?int\w*|float\d+|complex\d+|bool_?|str_|bytes_)|"
    r"numpy\._?core\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)|"
    r"deepspeed\.(runtime|utils|checkpoint|config|optim)\.[\w.]*(OffloadDeviceEnum|OffloadStateTypeEnum|"
    r"ActivationFuncType|LossScaler|DynamicLossScaler|fragment_address|SubparamShape)"
)


class RefusedClass(pickle.UnpicklingError):
    """A pickle names something that could run code. ``name`` is what, ``path`` the file."""

    def __init__(self, name, path="the file"):
        self.name, self.path = name, path
        super().__init__(name, path)

    def __str__(self):
        return (
            f"{self.path} contains {self.name}, which is neither a tensor nor plain data, and loading it could run "
            f"code. If you trust the file, let this name through with allow=[{self.name!r}], or everything with the "
            f'configuration {{"checkpoint": {{"trust_pickles": true}}}} or the environment variable '
            f"DS_CHECKPOINT_TRUST=1."
        )


class StorageType:
    """Stands for a storage class of torch in a pickle: such classes differ between versions, and none is needed."""

    def __init__(self, name, dtype):
        self.name, self.dtype = f"torch.{name}", dtype


STORAGE_TYPES = {
    f"{module}.{name}": StorageType(name, getattr(torch, dtype))
    for name, dtype in _STORAGES.items()
    for module in ("torch", "torch.storage", "torch.cuda")
}


class Unused:
    """Stands for an object that nobody asks for."""

    def __init__(self, *arguments):
        pass


def trusts_pickles():
    """Whether the environment variable DS_CHECKPOINT_TRUST lets every pickle do as it pleases."""
    return os.environ.get("DS_CHECKPOINT_TRUST", "").strip().lower() in ("1", "true", "yes", "on")


# ---- tensors -------------------------------------------------------------------------------------------------------
class _Tensors:
    """Tensors as the functions that rebuild them are called; ``memory_of(key, dtype, numel)`` has their storages."""

    def __init__(self, lazy, memory_of):
        self.lazy, self._memory_of = lazy, memory_of

    def tensor(self, memory, offset, size, stride, requires_grad=False, hooks=None, metadata=None):
        if not isinstance(memory, StoredMemory) or hooks:
            raise pickle.UnpicklingError("a tensor without a storage, or with hooks")
        found = LazyTensor(memory, offset, size, stride, bool(requires_grad))
        return found if self.lazy else found.share().requires_grad_(bool(requires_grad))

    def tensor_v3(self, memory, offset, size, stride, requires_grad, hooks, dtype, metadata=None):
        return self.tensor(memory.viewed_as(dtype), offset, size, stride, requires_grad, hooks)

    def parameter(self, data, requires_grad, hooks=None, state=None):
        if self.lazy:
            data.requires_grad = bool(requires_grad)
            return data
        return torch.nn.Parameter(data.detach(), requires_grad=bool(requires_grad))

    def from_type(self, rule, cls, arguments, state):
        found = rule(*arguments)
        if self.lazy or cls in (torch.Tensor, Unused):
            return found
        found = found.as_subclass(cls) if type(found) is not cls else found
        for name, value in (state if type(state) is dict else {}).items():
            setattr(found, name, value)
        return found

    def functions(self):
        """{"module.name": what a pickle gets for it}"""
        found = {f"torch._utils._rebuild_{name}": rule for name, rule in (
            ("tensor", self.tensor), ("tensor_v2", self.tensor), ("tensor_v3", self.tensor_v3),
            ("parameter", self.parameter), ("parameter_with_state", self.parameter))}  # fmt: skip
        found["torch._tensor._rebuild_from_type_v2"] = self.from_type
        return {**found, **STORAGE_TYPES}

    def persistent_load(self, pid):
        """A storage: ('storage', type, key, location, numel)."""
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] not in ("storage", b"storage"):
            raise pickle.UnpicklingError("a persistent id that is not a storage")
        kind, key, location, numel = pid[1:5]
        if type(kind) is not StorageType or type(key) is not str or type(location) is not str or type(numel) is not int:
            raise pickle.UnpicklingError("a storage of another kind")
        if location == "meta" or numel < 0 or (len(pid) == 6 and pid[5] is not None):
            raise pickle.UnpicklingError(f"the storage {key!r} has no values")
        return self._memory_of(key, kind.dtype, numel)


# ---- the machines --------------------------------------------------------------------------------------------------
class _Trusting(pickle.Unpickler):
    """Python's own machine, for files that may run code; only tensors are made as everywhere here."""

    def __init__(self, file, path, tensors):
        super().__init__(file, encoding="utf-8")
        self._functions, self.persistent_load = tensors.functions(), tensors.persistent_load

    def find_class(self, module, name):
        found = self._functions.get(f"{module}.{name}")
        return super().find_class(module, name) if found is None else found


def _stage(value):
    return value


def _member(cls, name):
    return _STAGES.get(name) if cls is _stage else Unused()


def _dictionary(*arguments):
    return {}


def _check_keys(keys):
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        if not all(type(part) in (str, int, float, bool, bytes, type(None), Unused) for part in parts):
            raise pickle.UnpicklingError(f"a key of type {type(key).__name__}")


class _Plain(pickle._Unpickler):
    """The machine of Python's library in Python, with fewer names and without ways to reach what it made."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def __init__(self, file, path, tensors):
        super().__init__(file, encoding="utf-8")
        self._path, self.persistent_load = path, tensors.persistent_load
        self._functions = {
            **tensors.functions(),
            "collections.OrderedDict": collections.OrderedDict,
            "collections.defaultdict": _dictionary,
            "builtins.dict": _dictionary,
            "builtins.getattr": _member,
            "torch.Size": torch.Size,
            "deepspeed.runtime.zero.config.ZeroStageEnum": _stage,
            "deepspeed.config.sections.ZeroStageEnum": _stage,
        }

    def find_class(self, module, name):
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if full in self._functions:
            return self._functions[full]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, (torch.dtype, torch.layout, torch.memory_format)):
            return dtype
        if _UNUSED.fullmatch(full):
            return Unused
        raise RefusedClass(full, self._path)

    def get_extension(self, code):
        raise pickle.UnpicklingError("a code of the extension registry: no checkpoint has these")

    def load_build(self):
        self.stack.pop()  # attributes: of a state dict or of something unused
        if not isinstance(self.stack[-1], (Unused, collections.OrderedDict, dict)):
            raise RefusedClass(f"{type(self.stack[-1]).__module__}.{type(self.stack[-1]).__qualname__}", self._path)

    dispatch[pickle.BUILD[0]] = load_build

    def load_append(self):
        item = self.stack.pop()
        if not isinstance(self.stack[-1], Unused):
            list.append(self.stack[-1], item)

    dispatch[pickle.APPEND[0]] = load_append

    def load_appends(self):
        items = self.pop_mark()
        if not isinstance(self.stack[-1], Unused):
            list.extend(self.stack[-1], items)

    dispatch[pickle.APPENDS[0]] = load_appends


def _keyed(code, keys_of):
    original = pickle._Unpickler.dispatch[code[0]]

    def load(machine):
        _check_keys(keys_of(machine.stack))
        original(machine)

    _Plain.dispatch[code[0]] = load


for _code, _keys_of in (
    (pickle.SETITEM, lambda stack: stack[-2:-1]),
    (pickle.SETITEMS, lambda stack: stack[::2]),
    (pickle.DICT, lambda stack: stack[::2]),
    (pickle.ADDITEMS, lambda stack: stack),
    (pickle.FROZENSET, lambda stack: stack),
):
    _keyed(_code, _keys_of)


def _run_pickle(file, path, tensors, trust):
    if trust:
        return _Trusting(file, path, tensors).load()
    try:
        return _Plain(file, path, tensors).load()
    except pickle.UnpicklingError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError,
            TypeError, ValueError, struct.error) as error:  # fmt: skip
        raise pickle.UnpicklingError(f"damaged pickle at byte {file.tell()}: {error}") from error


# ---- the archives --------------------------------------------------------------------------------------------------
def load(path, lazy=False, trust=None):
    """As ``formats.torch_archive.load``, with ``Unused`` in the place of what is neither tensors nor simple."""
    path, trust = os.fspath(path), trusts_pickles() if trust is None else trust
    with open(path, "rb") as file:
        zipped = file.read(2) == b"PK"
    if not zipped:
        return _load_legacy(path, lazy, trust)
    try:
        return _load_zip(path, lazy, trust)
    except (pickle.UnpicklingError, zipfile.BadZipFile):
        raise
    except (ArithmeticError, EOFError, LookupError, RuntimeError, ValueError, OSError, struct.error) as error:
        # The zipfile module raises these for a damaged archive; a disk that fails raises something else.
        if trust or isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise zipfile.BadZipFile(f"{path} is damaged: {error}") from error


def _damaged(path, what):
    return pickle.UnpicklingError(f"{path} is damaged or no file of torch.save: {what}")


def _memories(path, source_of, swapped):
    """memory_of(key, dtype, numel), and the dict of what it has made."""
    made = {}

    def memory_of(key, dtype, numel):
        if key not in made:
            source = source_of(key, numel * itemsize(dtype))
            if numel * itemsize(dtype) > source.bytes:
                raise _damaged(path, f"the storage {key!r} has {source.bytes} bytes, not {numel} elements of {dtype}")
            source.bytes = numel * itemsize(dtype)
            made[key] = StoredMemory(source, dtype, swapped)
        if (made[key].dtype, made[key].numel) != (dtype, numel):
            raise _damaged(path, f"the storage {key!r} is of two kinds")
        return made[key]

    return memory_of, made


def _record(path, archive, name, identity):
    """The bytes of a record of a zip file."""
    try:
        info = archive.getinfo(name)
    except KeyError as error:
        raise zipfile.BadZipFile(f"{path}: there is no record {name!r}") from error
    if info.compress_type != zipfile.ZIP_STORED:
        return DeflatedRange(path, name, info.file_size, identity)
    archive.fp.seek(info.header_offset)
    fields = _LOCAL_HEADER.unpack(archive.fp.read(_LOCAL_HEADER.size))
    offset = info.header_offset + _LOCAL_HEADER.size + fields[9] + fields[10]
    if fields[0] != b"PK\x03\x04" or offset + info.file_size > identity[2]:
        raise zipfile.BadZipFile(f"{path}: the record {name!r} is not where the directory says")
    return FileRange(path, offset, info.file_size, identity)


def _load_zip(path, lazy, trust):
    with zipfile.ZipFile(path) as archive:
        identity = file_identity(archive.fp.fileno())
        roots = [name[:-8] for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(roots) != 1 or f"{roots[0]}constants.pkl" in archive.namelist():
            raise _damaged(path, f"it has {len(roots)} records data.pkl, or is a TorchScript program")
        order = f"{roots[0]}byteorder"
        swapped = order in archive.namelist() and archive.read(order) != sys.byteorder.encode()
        memory_of, _ = _memories(
            path, lambda key, size: _record(path, archive, f"{roots[0]}data/{key}", identity), swapped
        )
        structure = read_bytes(_record(path, archive, f"{roots[0]}data.pkl", identity))
        return _run_pickle(io.BytesIO(structure), path, _Tensors(lazy, memory_of), trust)


def _load_legacy(path, lazy, trust):
    """Five pickles: magic, version, system, object, keys of storages; then each storage, after its numel."""
    with open(path, "rb") as file:
        identity = file_identity(file.fileno())
        if _run_pickle(file, path, _Tensors(True, None), False) != _LEGACY_MAGIC:
            raise _damaged(path, "it does not begin as one")
        version, system = (_run_pickle(file, path, _Tensors(True, None), False) for _ in range(2))
        if version != _LEGACY_VERSION or type(system) is not dict:
            raise _damaged(path, "it is of an unknown version")
        swapped = (system.get("little_endian", True) is True) != (sys.byteorder == "little")
        memory_of, made = _memories(path, lambda key, size: FileRange(path, None, size, identity), swapped)
        start = file.tell()
        found = _run_pickle(file, path, _Tensors(True, memory_of), trust)
        keys = _run_pickle(file, path, _Tensors(True, None), False)
        if type(keys) is not list or set(map(str, keys)) != set(made) or len(keys) != len(made):
            raise _damaged(path, "its storages are not those that its tensors name")
        for key in map(str, keys):
            numel = int.from_bytes(file.read(8), "little" if not swapped else "big")
            source = made[key].source
            source.offset = file.tell()
            if numel != made[key].numel or source.offset + source.bytes > identity[2]:
                raise _damaged(path, f"the storage {key!r} is cut off or of another size")
            file.seek(source.bytes, os.SEEK_CUR)
        if lazy:
            return found
        file.seek(start)
        return _run_pickle(file, path, _Tensors(False, memory_of), trust)
