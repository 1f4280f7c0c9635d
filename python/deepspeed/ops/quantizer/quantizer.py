"""Fake quantization: each element becomes one of 2^bits numbers of its group ([Note: fake quantization] in
csrc/kernels/codes.h)."""

import torch

from deepspeed._native import tell_modes
from deepspeed.ops.codes import code_ops


def fake_quant(values, groups, bits, asymmetric=False, stochastic=False):
    """Rounds ``values`` in place and returns it.

    Args:
        values: fp32, fp16 or bf16, of any shape; its elements are cut into ``groups`` groups, in their order.
        bits: 1 to 8. asymmetric: between the smallest and the largest element of a group instead of around 0.
        stochastic: rounds up with the probability of the fraction; the seed comes from torch's generator on the CPU.

    A group with a NaN or an infinity becomes NaN. Raises ValueError for groups that do not divide the elements.
    """
    seed = int(torch.randint(1 << 62, ())) if stochastic else 0
    with torch.no_grad():
        dense = values.contiguous()
        code_ops().fake_quant(dense, groups, bits, asymmetric, stochastic, seed)
        tell_modes("fake_quant", dense)
        return values if dense is values else values.copy_(dense)


def ds_quantizer(input, groups=1, bit_num=8, sr=False, asym=False):  # noqa: A002 (published name)
    """Rounds ``input`` in place to ``2**bit_num`` numbers in each of ``groups`` groups, and returns it. ``sr``:
    stochastic rounding; ``asym``: see ``fake_quant``."""
    return fake_quant(input, groups, bit_num, asym, sr)
