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
from deepspeed.checkpoint.stored_tensor import StoredPieces, StoredTensor
from deepspeed.utils.lazy_tensor import itemsize
from deepspeed.zero.tensor_of_pieces import TensorOfPieces

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
