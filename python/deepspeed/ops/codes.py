"""Codes of signs and of blocks of integers over tensors, as kernels make them (csrc/kernels/codes.h)."""

import functools

import torch

from deepspeed._native import _C


@functools.lru_cache(maxsize=None)
def code_ops():
    """The kernels, on the CPU with torch's number of threads."""
    return _C.CodeOps(threads=torch.get_num_threads())
