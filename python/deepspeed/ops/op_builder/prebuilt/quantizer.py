"""The op ``quantizer``: integers of 4 and 8 bits, in groups that share a scale, on the CPU and on GPUs.

Symmetric codes are in two's complement, and a value is ``code * scale``. Asymmetric codes are unsigned, and a value is
``code * scale + offset``. Two codes of 4 bits share a byte, the first one in its low half. No element is clipped.
"""

import enum
import functools

import torch

from deepspeed.ops.codes import code_ops
from deepspeed.ops.quantizer.quantizer import fake_quant


class QuantizationType(enum.Enum):
    """Whether a group has an offset beside its scale."""

    Symmetric = 0
    Asymmetric = 1


Symmetric, Asymmetric = QuantizationType.Symmetric, QuantizationType.Asymmetric


def quantize(vals, groups, bits, quant_type):
    """Quantizes ``vals`` in ``groups`` groups of equally many elements.

    Returns:
        (torch.int8 codes, fp32 params). The codes have the shape of ``vals``; with 4 bits the last dimension is half as
        long. A row of the params is the scale of a group and, if asymmetric, its offset.
    """
    codes, params = code_ops().encode(vals, groups, bits, quant_type is Asymmetric)
    shape = list(vals.shape) or [1]
    shape[-1] = shape[-1] * bits // 8
    fits = codes.numel() == torch.Size(shape).numel()
    return codes.view(torch.int8).view(shape if fits else [-1]), params


def dequantize(quantized_data, params, groups, num_bits, quant_type):
    """Returns the fp16 values of ``quantize``."""
    return _decoded(quantized_data, params, groups, num_bits, quant_type, torch.float16)


def dequantize_fp32(quantized_data, params, groups, num_bits, quant_type):
    """Returns the fp32 values of ``quantize``."""
    return _decoded(quantized_data, params, groups, num_bits, quant_type, torch.float32)


def dequantize_int4_to_half_experimental(data_in, scale_buffer, min_val_buffer, num_group, group_size):
    """Returns the fp16 values of unsigned codes of 4 bits, ``code * scale + min_val``, one row for each group."""
    return _with_minima(data_in, scale_buffer, min_val_buffer, num_group, group_size, 4)


def dequantize_int8_to_half_experimental(data_in, scale_buffer, min_val_buffer, num_group, group_size):
    """Returns the fp16 values of unsigned codes of 8 bits, ``code * scale + min_val``, one row for each group."""
    return _with_minima(data_in, scale_buffer, min_val_buffer, num_group, group_size, 8)


def swizzle_quant(input_vals, groups, num_bits, quant_type, pipeline_size, nodes, devices_per_node):
    """Quantizes ``input_vals``, which are a part for each rank, node by node, in the order of an exchange inside nodes.

    Each part is cut into ``pipeline_size`` pieces. The result has the first piece of all parts, then the second: of a
    piece, the parts for the first device of every node come first, then those for the second.

    Returns:
        (torch.int8 codes, fp32 params), as ``quantize`` returns them, of one dimension.
    """
    ranks = nodes * devices_per_node
    if input_vals.numel() % (ranks * pipeline_size) or groups % (ranks * pipeline_size):
        raise ValueError(
            f"swizzle_quant got {input_vals.numel()} elements in {groups} groups; both must be multiples of "
            f"pipeline_size * nodes * devices_per_node = {ranks * pipeline_size}."
        )
    parts = input_vals.reshape(nodes, devices_per_node, pipeline_size, -1).permute(2, 1, 0, 3)
    codes, params = quantize(parts.reshape(-1), groups, num_bits, quant_type)
    return codes, params


def quantized_reduction(input_vals, input_scales, in_groups, out_groups, num_bits, quant_type, devices_per_node):
    """Averages equal parts of ``devices_per_node`` devices, in fp32 and in their order, and quantizes the result.

    ``in_groups`` is the number of groups of all parts, ``out_groups`` that of the result.

    Returns:
        (torch.int8 codes, fp32 params), as ``quantize`` returns them, of one dimension.
    """
    if in_groups % devices_per_node:
        raise ValueError(
            f"quantized_reduction got {in_groups} groups of {devices_per_node} devices; it takes equally many of each."
        )
    mean = code_ops().decode(
        input_vals, input_scales, in_groups // devices_per_node, num_bits, quant_type is Asymmetric, devices_per_node,
        torch.float32,
    )  # fmt: skip
    return quantize(mean, out_groups, num_bits, quant_type)


def _decoded(codes, params, groups, bits, quant_type, dtype):
    values = code_ops().decode(codes, params, groups, bits, quant_type is Asymmetric, 1, dtype)
    shape = [*codes.shape[:-1], codes.shape[-1] * 8 // bits] if codes.dim() else [-1]
    return values.view(shape)


def _with_minima(codes, scales, minima, groups, group_size, bits):
    params = torch.stack([scales.reshape(-1).float(), minima.reshape(-1).float()], 1)
    values = code_ops().decode(codes, params, groups, bits, True, 1, torch.float16)
    return values.view(groups, group_size)


def _rounding(asymmetric, stochastic):
    @functools.wraps(fake_quant)
    def function(vals, groups, bits):
        return fake_quant(vals, groups, bits, asymmetric, stochastic)

    return function


# Called by their dtype: (tensor, groups, bits), in place.
ds_quantize_fp32 = ds_quantize_fp16 = ds_quantize_bf16 = _rounding(False, False)
ds_sr_quantize_fp32 = ds_sr_quantize_fp16 = ds_sr_quantize_bf16 = _rounding(False, True)
ds_quantize_asym_fp32 = ds_quantize_asym_fp16 = ds_quantize_asym_bf16 = _rounding(True, False)
ds_sr_quantize_asym_fp32 = ds_sr_quantize_asym_fp16 = ds_sr_quantize_asym_bf16 = _rounding(True, True)
