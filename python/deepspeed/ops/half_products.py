"""Matrix products of 16-bit tensors on the CPU that add in fp32.

torch's own may add in 16 bits there (``deepspeed.host.product_error`` measures whether they do), or be missing. Then a
product of this library is the fp32 product of the same numbers, rounded once.
"""

import torch

from deepspeed._compat import autocast_is_on, is_compiling
from deepspeed.host.product_error import adds_in_fp32

_HALVES = (torch.bfloat16, torch.float16)


def needs_fp32(*factors):
    """Whether torch's own product of these tensors would not add in fp32. Factors that are None do not count."""
    first = factors[0]
    if first.dtype not in _HALVES or is_compiling():  # a compiled graph has the compiler's products
        return False
    same = all(one is None or (one.dtype == first.dtype and one.device.type == "cpu") for one in factors)
    return same and not adds_in_fp32(first.dtype)


def add_in_fp32(product, *factors):
    """``product(*factors)``, in fp32 and rounded once where ``needs_fp32``. Gradients of any order follow from it."""
    if not needs_fp32(*factors):
        return product(*factors)
    wide = [None if one is None else one.float() for one in factors]
    if not autocast_is_on("cpu"):
        return product(*wide).to(factors[0].dtype)
    with torch.autocast("cpu", enabled=False):  # it would make 16-bit numbers of them again
        return product(*wide).to(factors[0].dtype)
