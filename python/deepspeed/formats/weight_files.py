"""Weights that lie in pieces in the files of a checkpoint, and the files that they are exported to.

Everything goes through in chunks: what an export holds in memory does not depend on the size of a tensor.
"""

import errno
import json
import os
import re
import secrets
import struct

import torch

from deepspeed.formats.byte_ranges import write_tensor
from deepspeed.formats.lazy_tensor import LazyTensor, itemsize
from deepspeed.formats.torch_archive_writer import write_torch_stream

_CHUNK_NUMEL = 4 << 20
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip

_SAFETENSORS_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64"}  # fmt: skip
SAFETENSORS_DTYPES = {
    name: getattr(torch, dtype) for name, dtype in _SAFETENSORS_NAMES.items() if hasattr(torch, dtype)
}


class StoredWeight:
    """A weight whose elements, in row-major order, are ``pieces``: (tensor or LazyTensor, first element, numel).

    shape: torch.Size. dtype: of the weight, whatever that of the pieces. ``contiguous()`` makes the tensor.
    """

    def __init__(self, pieces, shape, dtype):
        self.pieces, self.shape, self.dtype = list(pieces), torch.Size(shape), dtype
        held = sum(numel for _, _, numel in self.pieces)
        if held != self.shape.numel():
            raise ValueError(f"a weight of shape {tuple(shape)} in pieces of {held} elements")

    def numel(self):
        return self.shape.numel()

    def _opened(self, source):
        """The object from which the chunks of ``source``, one of the pieces, are read."""
        if isinstance(source, LazyTensor) and not source.is_contiguous():
            source = source.read()  # its elements lie all over the storage
        return source if isinstance(source, LazyTensor) else source.detach().reshape(-1)

    def _parts(self):
        for source, start, numel in self.pieces:
            source = self._opened(source)
            for at in range(start, start + numel, _CHUNK_NUMEL):
                count = min(_CHUNK_NUMEL, start + numel - at)
                yield source[at : at + count].cpu() if torch.is_tensor(source) else source.read_range(at, count)

    def contiguous(self):
        """The tensor, on the CPU; besides it one chunk is in memory."""
        flat, at = torch.empty(self.numel(), dtype=self.dtype), 0
        for part in self._parts():
            flat[at : at + part.numel()].copy_(part)
            at += part.numel()
        return flat.view(self.shape)

    def chunks(self):
        """The bytes, as 1-D uint8 tensors."""
        for part in self._parts():
            yield part.to(self.dtype).contiguous().view(torch.uint8)

    def __repr__(self):
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"


def as_weight(value):
    """A tensor, on any device, as a weight; a weight as it is; None for anything else."""
    if isinstance(value, StoredWeight):
        return value
    if not isinstance(value, (torch.Tensor, LazyTensor)):
        return None
    return StoredWeight([(value, 0, value.numel())], value.shape, value.dtype)


def write_torch(path, value):
    """Writes a structure with tensors and weights in it, in torch.save's format."""
    write_torch_stream(path, value, as_weight)


def write_safetensors(path, weights):
    """Writes ``{name: tensor or weight}`` as safetensors, one chunk after the other."""
    weights = {name: as_weight(value) for name, value in weights.items()}
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    # Larger elements first, as the format's own writer does: every tensor is then aligned to its elements.
    order = sorted(weights, key=lambda name: -itemsize(weights[name].dtype))
    for name in order:
        weight = weights[name]
        size = weight.shape.numel() * itemsize(weight.dtype)
        header[name] = {
            "dtype": names[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            for chunk in weights[name].chunks():
                write_tensor(file, chunk)
        os.fsync(file.fileno())


def parse_size(text):
    """Bytes in a size like "5GB" (10**9), "5GiB" (2**30) or 5000000000. ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if found is None or found.group(2).upper() not in _UNITS or isinstance(text, bool):
        raise ValueError(f"max_shard_size = {text!r} is not a size: write it like '5GB', '500MB' or 5000000000")
    size = int(float(found.group(1)) * _UNITS[found.group(2).upper()])
    if size < 1:
        raise ValueError(f"max_shard_size = {text!r} is too small for a file")
    return size


def _shards(weights, limit, tied):
    """Names by file, in order: as many as fit; a weight larger than the limit has a file of its own. ``tied``: names of
    one weight go together and count once."""
    shards, used, names_of = [[]], 0, {}
    for name, weight in weights.items():
        if tied and id(weight) in names_of:
            names_of[id(weight)].append(name)
            continue
        size = weight.numel() * itemsize(weight.dtype)
        if limit is not None and shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        names_of[id(weight)], used = shards[-1], used + size
    return shards


def write_weight_files(weights, folder, max_shard_size=None, safe_serialization=False, filename=None):
    """Writes ``{name: tensor or StoredWeight}`` to ``folder``: pytorch_model.bin or model.safetensors, or numbered
    files and an index when that is larger than ``max_shard_size``. Names of the same object are tied.

    Returns the files, which appear under their names when they are whole.
    """
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    made = {}
    weights = {name: made.setdefault(id(value), as_weight(value)) for name, value in weights.items()}
    filename = filename or ("model.safetensors" if safe_serialization else "pytorch_model.bin")
    stem, ending = os.path.splitext(filename)
    shards = _shards(weights, limit, tied=not safe_serialization)
    count = len(shards)
    names = [filename] if count == 1 else [f"{stem}-{i:05d}-of-{count:05d}{ending}" for i in range(1, count + 1)]
    os.makedirs(folder, exist_ok=True)
    write = write_safetensors if safe_serialization else write_torch
    for name, shard in zip(names, shards):
        write_whole(os.path.join(folder, name), write, {key: weights[key] for key in shard})
    if count > 1:
        # safetensors has no ties: it holds the values under each of the names.
        written = weights if safe_serialization else {id(weight): weight for weight in weights.values()}
        total = sum(weight.numel() * itemsize(weight.dtype) for weight in written.values())
        where = {key: name for name, shard in zip(names, shards) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": {key: where[key] for key in weights}}
        names.append(f"{filename}.index.json")
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_whole(os.path.join(folder, names[-1]), write_text, text)
    return [os.path.join(folder, name) for name in names]


def write_text(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def write_whole(path, write, content):
    """``write(path, content)`` through a temporary file: under ``path`` stands a whole file or what was there before.
    OSError that names the file."""
    temporary = f"{path}.writing.{secrets.token_hex(8)}"  # a random name: no link can be there
    try:
        write(temporary, content)
        try:
            os.replace(temporary, path)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                raise
            for old in (temporary, path):  # a mounted object store, which neither renames nor writes a file twice
                if os.path.exists(old):
                    os.unlink(old)
            write(path, content)
    except BaseException as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.strerror:
            raise OSError(
                error.errno, f"cannot write {path}: {error.strerror}. Check space and permissions."
            ) from error
        raise
