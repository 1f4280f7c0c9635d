"""The safetensors format: an 8-byte length, a JSON header, the bytes of the tensors (huggingface.co/docs/safetensors).

No package of that name is needed, neither to read nor to write.
"""

import json
import os
import struct

import torch

from deepspeed.utils.byte_ranges import FileRange, file_identity, write_tensor
from deepspeed.utils.lazy_tensor import LazyTensor, StoredMemory, itemsize, row_major

_LONGEST_HEADER = 100_000_000  # the format's own bound
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "U16": "uint16", "U32": "uint32",
          "U64": "uint64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64"}  # fmt: skip
SAFETENSORS_DTYPES = {name: getattr(torch, dtype) for name, dtype in _NAMES.items() if hasattr(torch, dtype)}


class DamagedSafetensors(ValueError):
    """A file that is no safetensors file, or whose header contradicts itself."""


def read_safetensors(path):
    """``({name: LazyTensor}, metadata)`` of a file. DamagedSafetensors, OSError."""
    path = os.fspath(path)
    with open(path, "rb") as file:
        identity = file_identity(file.fileno())
        length = int.from_bytes(file.read(8), "little")
        if identity[2] < 8 or length > min(_LONGEST_HEADER, identity[2] - 8):
            raise DamagedSafetensors(f"{path}: a header of {length} bytes in a file of {identity[2]}")
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise DamagedSafetensors(f"{path}: its header cannot be read ({error})") from error
    if type(header) is not dict:
        raise DamagedSafetensors(f"{path}: its header is no object")
    metadata = header.pop("__metadata__", {})
    start, end, found, places = 8 + length, identity[2], {}, []
    for name, entry in header.items():
        try:
            tensor, place = _tensor(path, entry, start, end, identity)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedSafetensors(f"{path}: the tensor {name!r}: {error}") from error
        found[name] = tensor
        places.append((*place, name))
    last, last_name = 0, None
    for begin, finish, name in sorted(places):
        if begin < last:
            raise DamagedSafetensors(f"{path}: the tensors {last_name!r} and {name!r} overlap")
        last, last_name = finish, name
    return found, metadata


def _without_repeats(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _tensor(path, entry, start, end, identity):
    if entry["dtype"] not in SAFETENSORS_DTYPES:
        raise ValueError(f"the dtype {entry['dtype']!r} is unknown to torch {torch.__version__}")
    dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], entry["shape"]
    begin, finish = entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, finish)):
        raise ValueError("sizes that are no numbers")
    numel = 1
    for n in shape:
        numel *= n
    if finish - begin != numel * itemsize(dtype) or start + finish > end:
        raise ValueError(f"{numel} elements of {dtype} in the bytes {begin} to {finish}")
    source = FileRange(path, start + begin, finish - begin, identity)
    return LazyTensor(StoredMemory(source, dtype), 0, shape, row_major(shape)), (begin, finish)


def write_safetensors_stream(path, weights, metadata=None):
    """Writes ``{name: weight}`` to ``path``, one chunk after the other. A weight has ``shape``, ``dtype`` and
    ``chunks()``, which yields 1-D uint8 tensors on the CPU."""
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    header, offset = {"__metadata__": dict(metadata or {"format": "pt"})}, 0
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
