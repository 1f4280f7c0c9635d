"""Pickles a value the way torch.save does, but takes tensors apart itself: into records of exactly their elements.

The format is that of torch.serialization: pickle protocol 2, storages as persistent ids
``("storage", torch.FloatStorage, key, "cpu", numel)``, tensors as calls of ``torch._utils._rebuild_tensor_v2``. In the
stream that torch.save wrote before zip archives, persistent ids have one part more.
"""

import collections
import io
import pickle

import torch

from deepspeed import _compat
from deepspeed.formats import lazy_tensor
from deepspeed.formats.lazy_tensor import itemsize
from deepspeed.zero.tensor_of_pieces import TensorOfPieces

# ---- stored tensor -------------------------------------------------------------------------------------------------
# The bytes of a tensor in a file, taken from its memory piece by piece: no second copy of a state is ever made.


class Staging:
    """Host memory, at most ``bytes`` of it, through which tensors pass that are elsewhere or have gaps.

    Made when first needed; pinned for tensors of a GPU, so that copies are fast.
    """

    def __init__(self, bytes):
        self.bytes = max(bytes, 4096)
        self._memory = {}

    def copy(self, tensor):
        """The elements of ``tensor`` (at most ``bytes``) in row-major order, valid until the next call."""
        pinned = tensor.device.type == "cuda"
        if pinned not in self._memory:
            self._memory[pinned] = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=pinned)
        used = tensor.numel() * tensor.element_size()
        return self._memory[pinned][:used].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class StoredTensor:
    """``bytes`` of a file that hold the elements of ``tensor``, and how a tensor over them must be strided.

    In memory order, a tensor without gaps keeps its memory as it is, with its strides (transposed, expanded ...): what
    shares that memory shares the bytes, ``key`` being equal. A tensor with gaps (a slice of columns), and every tensor
    in row-major order that is not so already, is put in order while it is written, a piece at a time.
    """

    def __init__(self, tensor, row_major=False):
        tensor = tensor.detach()
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.stride = tuple(tensor.stride())
        self.numel = tensor.numel()
        lazy = tensor.is_conj() or tensor.is_neg()
        in_order = tensor.is_contiguous()
        span = self.numel if in_order else 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride))
        if span <= self.numel and not lazy and (in_order or not row_major):
            self._flat, self._rows = tensor.as_strided((span,), (1,)), None
            self.numel = span
        else:
            self._flat, self._rows = None, tensor
            self.stride = lazy_tensor.row_major(self.shape)
        self.bytes = self.numel * tensor.element_size()
        # Tensors without elements have no address that would tell them apart.
        place = tensor.data_ptr() if self.numel else id(self)
        way = None if self._rows is None else (self.shape, tensor.stride(), lazy)
        self.key = (tensor.device, place, self.dtype, self.bytes, way)

    def pieces(self, staging):
        """Yields (address, bytes) of host memory, in order, valid until the next one is asked for."""
        if not self.bytes:
            return
        if self.in_place():
            yield self._flat.data_ptr(), self.bytes
            return
        size = self.bytes // self.numel
        for part in _parts(self._rows if self._flat is None else self._flat, staging.bytes // size):
            yield staging.copy(part).data_ptr(), part.numel() * size

    def copy_to(self, memory):
        """Copies all elements into ``memory``, a 1-D uint8 tensor on the host of ``bytes``; from another device into
        pinned memory, the copy is only queued."""
        target = memory.view(self.dtype)
        if self._flat is not None:
            target.copy_(self._flat, non_blocking=True)
        else:
            target.view(self.shape).copy_(self._rows, non_blocking=True)

    def copy_range(self, memory, begin, end):
        """Copies bytes ``begin`` to ``end`` into ``memory``, as ``copy_to`` copies all."""
        flat = self._flat
        if flat is None:
            flat = torch.empty(self.shape, dtype=self.dtype, device=self._rows.device).copy_(self._rows).reshape(-1)
        memory.copy_(flat.view(torch.uint8)[begin:end], non_blocking=True)

    @property
    def device_type(self):
        return (self._flat if self._flat is not None else self._rows).device.type

    def in_place(self):
        """Whether ``pieces`` hands out the tensor's own memory."""
        return self._flat is not None and self._flat.device.type == "cpu"


class StoredPieces:
    """The same of a ``TensorOfPieces``."""

    def __init__(self, tensor):
        self.dtype, self.numel = tensor.dtype, tensor.numel
        self.shape, self.stride = (tensor.numel,), (1,)
        self._parts = [StoredTensor(part) for part in tensor.parts]
        self.bytes = sum(part.bytes for part in self._parts)
        self.key = id(tensor)

    def pieces(self, staging):
        for part in self._parts:
            yield from part.pieces(staging)

    def copy_to(self, memory):
        at = 0
        for part in self._parts:
            part.copy_to(memory[at : at + part.bytes])
            at += part.bytes

    def copy_range(self, memory, begin, end):
        at = 0
        for part in self._parts:
            first, last = max(begin, at), min(end, at + part.bytes)
            if first < last:
                part.copy_range(memory[first - begin : last - begin], first - at, last - at)
            at += part.bytes

    @property
    def device_type(self):
        return next((part.device_type for part in self._parts if part.device_type != "cpu"), "cpu")

    def in_place(self):
        return all(part.in_place() for part in self._parts)


class StoredSlice:
    """Bytes ``begin`` to ``end`` of another source."""

    def __init__(self, source, begin, end):
        self._source, self._begin, self._end = source, begin, end
        self.bytes = end - begin

    def pieces(self, staging):
        at = 0
        for address, size in self._source.pieces(staging):
            first, last = max(self._begin, at), min(self._end, at + size)
            if first < last:
                yield address + first - at, last - first
            at += size
            if at >= self._end:
                return

    def copy_to(self, memory):
        self._source.copy_range(memory, self._begin, self._end)

    @property
    def device_type(self):
        return self._source.device_type

    def in_place(self):
        return self._source.in_place()


def _parts(tensor, most):
    """The tensor cut along its first dimensions, in row-major order, into parts of at most ``most`` elements."""
    if tensor.numel() <= most:
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    if row > most:
        for part in tensor:
            yield from _parts(part, most)
        return
    for begin in range(0, tensor.shape[0], most // row):
        yield tensor[begin : begin + most // row]


# ---- torch pickler -------------------------------------------------------------------------------------------------

PROTOCOL = 2  # the one that torch.load(weights_only=True) reads


def tensor_names(value):
    """{id of a tensor: where it stands in ``value``}, for dicts, lists and tuples: ``module.fc.weight``,
    ``states[0].step``. The first place wins.
    """
    names, seen = {}, set()
    waiting = [(value, "")]
    while waiting:
        item, name = waiting.pop()
        if isinstance(item, (torch.Tensor, TensorOfPieces)):
            names.setdefault(id(item), name)
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                children = [(child, f"{name}.{key}" if name else str(key)) for key, child in item.items()]
            else:
                children = [(child, f"{name}[{index}]") for index, child in enumerate(item)]
            waiting.extend(reversed(children))
    return names


class _Memory:
    """Stands in a pickle for the storage of one record."""

    def __init__(self, id):
        self.id = id


# Most objects of a state: that they are no storages is known without a question.
ORDINARY = frozenset({str, int, float, bool, bytes, type(None), tuple, list, dict, type, collections.OrderedDict})


class _Pickler(pickle.Pickler):
    def __init__(self, file, names, stream):
        super().__init__(file, protocol=PROTOCOL)
        self.names = names
        self.stream = stream
        self.records = {}  # (StoredTensor.key, class in a stream, else None): (record's name, StoredTensor)
        self.counts = {}  # record's name: elements, as its storage counts them
        self.tensors = []  # (name, StoredTensor, shape) of every tensor
        self.storage_names = torch.storage._dtype_to_storage_type_map()
        self.alive = []  # what was made while pickling: an address must not be used again before the file is written

    def persistent_id(self, obj):
        kind = type(obj)
        if kind in ORDINARY:
            return None
        if kind is _Memory:
            return obj.id
        # Storages by themselves, and those of kinds of tensors that torch takes apart (quantized, subclasses).
        if isinstance(obj, torch.storage.TypedStorage):
            storage_class = getattr(torch, self.storage_names[obj.dtype])
            return self._storage_id(_compat.untyped_storage(obj), storage_class, obj.dtype)
        if torch.is_storage(obj):
            return self._storage_id(obj, type(obj), torch.uint8)
        return None

    def _storage_id(self, storage, storage_class, dtype):
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        key, stored = self._record(content, StoredTensor(content), storage_class)
        return self._id(storage_class, key, stored.bytes // itemsize(dtype))

    def _id(self, storage_class, key, numel):
        self.counts[key] = numel
        found = ("storage", storage_class, key, "cpu", numel)
        return (*found, None) if self.stream else found  # there, also what part of a storage it is: all of it

    def _record(self, tensor, stored, storage_class):
        """(name, StoredTensor) of the record with these bytes: an earlier one over the same memory, or a new one. In a
        stream a record has one class of storage."""
        self.alive.append(tensor)
        known = (stored.key, storage_class if self.stream else None)
        return self.records.setdefault(known, (str(len(self.records)), stored))

    def reducer_override(self, obj):
        if type(obj) is torch.nn.Parameter and is_plain(obj):
            data = obj.data
            self.alive.append(data)
            self.names[id(data)] = self.names.get(id(obj))
            return torch._utils._rebuild_parameter, (data, obj.requires_grad, collections.OrderedDict())
        if type(obj) is torch.Tensor and is_plain(obj):
            return self._reduce_tensor(obj, StoredTensor(obj), obj.requires_grad)
        if type(obj) is TensorOfPieces:
            return self._reduce_tensor(obj, StoredPieces(obj), False)
        return NotImplemented

    def _reduce_tensor(self, tensor, own, requires_grad):
        legacy = self.storage_names.get(tensor.dtype)
        storage_class = getattr(torch, legacy) if legacy else torch.UntypedStorage
        key, stored = self._record(tensor, own, storage_class)
        self.tensors.append((self.names.get(id(tensor)) or f"data/{key}", stored, own.shape))
        arguments = (
            _Memory(self._id(storage_class, key, stored.numel if legacy else stored.bytes)),
            0,
            own.shape,
            own.stride,
            requires_grad,
            collections.OrderedDict(),
        )
        if legacy:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, tensor.dtype)


def is_plain(tensor):
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def dump(value, stream=False):
    """Pickles ``value``. Returns (the pickle as bytes, [(key, StoredTensor)] of the records it refers to,
    [(name, StoredTensor, shape)] of the tensors in it, {key: elements of a record}).

    ``stream``: as in the format before the zip archives. Attributes that were set on tensors and parameters are not
    saved. Raises what pickle raises for values that it cannot take.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, tensor_names(value), stream)
    pickler.dump(value)
    return file.getvalue(), list(pickler.records.values()), pickler.tensors, pickler.counts
