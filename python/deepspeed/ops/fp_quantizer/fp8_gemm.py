"""Products with weights that rest as floats of 8 bits."""

import torch


def matmul_fp8(inp, weight, scale, quantization_group_size, quantizer):
    """``inp @ weight``, in the dtype of ``inp``.

    Args:
        inp: ``[..., k]``. weight, scale: codes ``[k, n]`` and their scales, as ``quantizer.quantize(...,
            return_meta_tensor=True)`` returned them for groups of ``quantization_group_size`` elements.
        quantizer: an ``FP_Quantize``. ValueError if its groups have another size.
    """
    if quantizer.group_size != quantization_group_size:
        raise ValueError(
            f"quantization_group_size is {quantization_group_size}, and the quantizer has groups of "
            f"{quantizer.group_size}: both need the same"
        )
    out = torch.empty(weight.shape, dtype=inp.dtype, device=weight.device)
    return inp @ quantizer.dequantize(weight, fp_out=out, scale=scale)
