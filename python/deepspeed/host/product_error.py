"""Measures the error of torch's own products of 16-bit matrices on this processor. No version number tells it.

torch 1.13 adds up a product of two row-major bf16 matrices in bf16 on processors without AVX-512; other processors and
torch 2.x add in fp32 and round the result once.
"""

import sys
from functools import lru_cache

_ROWS, _INNER = 64, 512


@lru_cache(maxsize=None)
def product_error(dtype):
    """The relative error of ``a @ b`` on the CPU, both row-major and of ``dtype``, ``[64, 512]`` and ``[512, 64]``: the
    norm of what differs from the fp64 product of the same numbers. None where torch has no such product.

    Measured once per process; the caller's random numbers stay what they are.
    """
    torch = sys.modules["torch"]
    draw = torch.Generator(device="cpu").manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        shapes = ((_ROWS, _INNER), (_INNER, _ROWS))
        a, b = (torch.randn(*shape, generator=draw, device="cpu", dtype=torch.float32).to(dtype) for shape in shapes)
        exact = a.double() @ b.double()
        try:
            found = a @ b
        except RuntimeError:  # fp16 with torch 1.13
            return None
        return ((found.double() - exact).norm() / exact.norm()).item()


def largest_error(dtype):
    """The largest relative error of a product that adds in fp32: that of rounding each number of the result once."""
    return sys.modules["torch"].finfo(dtype).eps / 2


def adds_in_fp32(dtype):
    """Whether torch's own products of this 16-bit type are as exact as their results can be."""
    error = product_error(dtype)
    return error is not None and error <= largest_error(dtype)


def bf16_products():
    """The text of the report, such as ``"relative error 2.68 %"``."""
    error = product_error(sys.modules["torch"].bfloat16)
    return "none" if error is None else f"relative error {error:.2%}"


def product_warning():
    """One paragraph when torch's bf16 products on this processor do not add in fp32, else None."""
    torch = sys.modules["torch"]
    error = product_error(torch.bfloat16)
    if error is None or adds_in_fp32(torch.bfloat16):
        return None
    return (
        f"bf16 matrix products of torch {torch.__version__} are inexact on this processor: the relative error of a "
        f"product of [{_ROWS}, {_INNER}] and [{_INNER}, {_ROWS}] is {error:.2%}, measured, and adding in fp32 keeps it "
        f"below {largest_error(torch.bfloat16):.2%}. It grows with the inner size, and gradients of linear layers are "
        f"such products. Use torch 2.x, which adds in fp32 (pip install 'torch>=2'), or train in fp32 (leave bf16 out "
        f"of the configuration)."
    )
