"""Chooses what computes an attention: our kernels, torch's fused attention, or the formula in torch's operations."""

import functools
import os

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator

BY_KERNEL = (torch.float32, torch.bfloat16, torch.float16)


@functools.lru_cache(maxsize=4)
def _ops_of(threads):
    return _C.AttentionOps(threads)


def ops():
    """The kernels, on as many threads as torch's."""
    return _ops_of(torch.get_num_threads())


def on_host(tensor):
    """Whether the kernels of the CPU compute attention of such queries block by block."""
    return get_accelerator()._on_host(tensor.device) and tensor.dtype in BY_KERNEL


def _built_for(device):
    return _C.AttentionOps.built_for(device.type)


def _asked():
    asked = os.environ.get("DS_ATTENTION", "")
    if asked not in ("", "kernel", "torch"):
        raise ValueError(f"DS_ATTENTION is {asked!r}: it is 'kernel', 'torch' or not set")
    return asked


def body_for(query, plain):
    """``"kernel"``, ``"fused"`` (torch's scaled_dot_product_attention) or ``"formula"``, for attention of ``query``.

    On the CPU our kernels; on other devices torch's fused attention where its result is the same (``plain``), else our
    kernels, and the formula where there are none for the device or the dtype. ``DS_ATTENTION=kernel`` asks for our
    kernels everywhere, ``DS_ATTENTION=torch`` for none of them. ValueError if the kernels are asked for and missing.
    """
    asked, device = _asked(), query.device
    kernels = query.dtype in BY_KERNEL and (on_host(query) or _built_for(device))
    if asked == "kernel" and not kernels:
        raise ValueError(
            f"DS_ATTENTION=kernel: attention of {query.dtype} on {device} has no kernel. The kernels compute "
            "fp32, bf16 and fp16, on the CPU and on CUDA: use one of these, or unset DS_ATTENTION"
        )
    fused = plain and hasattr(torch.nn.functional, "scaled_dot_product_attention")
    if asked == "torch":
        return "fused" if fused else "formula"
    if kernels and (asked == "kernel" or on_host(query) or not fused):
        return "kernel"
    return "fused" if fused else "formula"
