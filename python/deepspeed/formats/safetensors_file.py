"""Reads the safetensors format: an 8-byte length, a JSON header, the bytes of the tensors
(huggingface.co/docs/safetensors). No package of that name is needed, neither to read nor to write."""

import os

import torch

from deepspeed._native import _C
from deepspeed.formats.lazy_tensor import LazyTensor, StoredMemory, row_major
from deepspeed.formats.torch_archive import DTYPES, LargeRange
from deepspeed.formats.weight_files import SAFETENSORS_DTYPES

__all__ = ["SAFETENSORS_DTYPES", "DamagedSafetensors", "read_safetensors"]

# A file that is no safetensors file, or whose header contradicts itself: a ValueError.
DamagedSafetensors = _C.formats.DamagedSafetensors
_KNOWN = [str(dtype)[6:] for dtype in SAFETENSORS_DTYPES.values()]


def read_safetensors(path):
    """``({name: LazyTensor}, metadata)`` of a file. DamagedSafetensors, OSError."""
    path = os.fspath(path)
    tensors, metadata, identity = _C.formats.safetensors_header(path, _KNOWN, torch.__version__)
    return {
        name: LazyTensor(
            StoredMemory(LargeRange(path, offset, size, identity), DTYPES[dtype]), 0, shape, row_major(shape)
        )
        for name, dtype, shape, offset, size in tensors
    }, metadata
