"""Tensors as small floats: 4, 6, 8 or 12 bits, in groups that share a scale ([Note: small floats] in
csrc/kernels/codes.h)."""

import abc
import math

import torch

from deepspeed._native import tell_modes
from deepspeed.formats.coded_weight import MANTISSA_BITS
from deepspeed.ops.codes import code_ops

_SCALE_BYTES = 4


class Quantizer(abc.ABC):
    """The interface of quantizers. ``group_size``: elements that share a scale."""

    def __init__(self, group_size=512):
        self.group_size = group_size

    @abc.abstractmethod
    def quantize(self, input, q_bits=8, q_mantisa_bits=3, stochastic_mode=False, return_meta_tensor=False):  # noqa: A002
        """Returns codes of ``input``."""

    @abc.abstractmethod
    def dequantize(self, input_q, fp_out=None, q_bits=8, q_mantisa_bits=3, scale=None):
        """Returns the tensor of codes."""


def checked_bits(bits, mantissa):
    """Returns ``bits``. ValueError unless they are those of a format, and ``mantissa`` is 3 or that of the format."""
    if bits not in MANTISSA_BITS:
        raise ValueError(f"q_bits is {bits}: small floats have {', '.join(map(str, MANTISSA_BITS))} bits")
    own = MANTISSA_BITS[bits]
    if mantissa not in (3, own):
        raise ValueError(f"q_mantisa_bits is {mantissa}: floats of {bits} bits have {own} bits of mantissa")
    return bits


def encode_rows(values, group_size, bits, stochastic=False, seed=0):
    """Codes and scales of ``values``, whole groups of them: uint8 ``[groups, group_size * bits / 8 + 4]``."""
    rows = code_ops().encode_floats(values, group_size, bits, stochastic, seed)
    tell_modes("encode_floats", rows, values)
    return rows


def decode_rows(rows, group_size, bits, dtype):
    """The values of such rows, ``[groups, group_size]``."""
    values = code_ops().decode_floats(rows, group_size, bits, dtype)
    tell_modes("decode_floats", values, rows)
    return values


class FP_Quantize(Quantizer):
    """Codes of fp32, bf16 and fp16 tensors as small floats, on any device, and back.

    ``quantization_config``: has ``group_size``, and may have ``q_dtype`` (torch.uint8). One object remembers the shape,
    dtype and scales of the last tensor that it has quantized.
    """

    def __init__(self, quantization_config):
        super().__init__(group_size=quantization_config.group_size)
        self.q_dtype = getattr(quantization_config, "q_dtype", torch.uint8)
        if self.q_dtype is not torch.uint8:
            raise ValueError(f"q_dtype is {self.q_dtype}: codes of small floats are torch.uint8")
        self.orig_dtype = self.orig_shape = self.num_groups = self.scale = None

    def quantize(self, input, q_bits=8, q_mantisa_bits=3, stochastic_mode=False, return_meta_tensor=False):  # noqa: A002
        """Codes and scales of ``input``, whose elements are cut into groups in their order.

        Args:
            q_bits: 4 (e2m1), 6 (e3m2), 8 (e4m3) or 12 (e4m7). q_mantisa_bits: 3, or that of the format.
            stochastic_mode: rounds up with the probability of the fraction; the seed comes from torch's generator.
            return_meta_tensor: with 8 bits, codes and scales apart.

        Returns:
            uint8 ``[groups, group_size * q_bits / 8 + 4]``: codes and an fp32 scale. With ``return_meta_tensor``
            codes in the shape of ``input``, and scales, uint8 ``[groups, 4]``. A group with a NaN or an infinity comes
            back as NaN. Raises ValueError for groups that do not divide the elements, and for other widths.
        """
        bits = checked_bits(q_bits, q_mantisa_bits)
        if return_meta_tensor and bits != 8:
            raise ValueError(
                f"return_meta_tensor is for 8 bits, whose codes have the shape of the tensor; q_bits is {bits}"
            )
        seed = int(torch.randint(1 << 62, ())) if stochastic_mode else 0
        rows = encode_rows(input, self.group_size, bits, stochastic_mode, seed)
        self.orig_dtype, self.orig_shape, self.num_groups = input.dtype, input.shape, rows.shape[0]
        self.scale = rows[:, -_SCALE_BYTES:].contiguous()
        return (rows[:, :-_SCALE_BYTES].reshape(input.shape), self.scale) if return_meta_tensor else rows

    def to(self, *args, **kwargs):
        """Moves the scales; returns this object."""
        if self.scale is not None:
            self.scale = self.scale.to(*args, **kwargs)
        return self

    def get_scales(self):
        """The scales of the last quantized tensor, fp32 ``[groups]``."""
        if self.scale is None:
            raise ValueError("get_scales follows quantize: nothing has been quantized")
        return self.scale.view(torch.float32).flatten()

    def dequantize(self, input_q, fp_out=None, q_bits=8, q_mantisa_bits=3, scale=None):
        """The tensor of codes that ``quantize`` returned.

        Args:
            fp_out: where to put it; None: a new tensor, in the shape and dtype of the last quantized one.
            scale: scales that are apart from the codes: uint8 ``[groups, 4]`` or fp32 ``[groups]``. ValueError unless
                each is a finite non-zero number.
        """
        bits = checked_bits(q_bits, q_mantisa_bits)
        if fp_out is None and self.orig_shape is None:
            raise ValueError("dequantize needs fp_out, because this object has quantized nothing and knows no shape")
        shape = self.orig_shape if fp_out is None else fp_out.shape
        return self._decoded(self._rows(input_q, bits, scale), bits, shape, fp_out)

    def selective_dequantize(self, input_q, indexes, fp_out=None, q_bits=8, q_mantisa_bits=3, scale=None):
        """As ``dequantize``, of rows ``indexes`` of the first dimension alone. Each row has whole groups."""
        bits = checked_bits(q_bits, q_mantisa_bits)
        if self.orig_shape is None:
            raise ValueError("selective_dequantize follows quantize: this object has quantized nothing")
        rows, first = self._rows(input_q, bits, scale), self.orig_shape[0]
        if rows.shape[0] % first:
            raise ValueError(
                f"{rows.shape[0]} groups of {self.group_size} elements are not whole rows of a tensor of shape "
                f"{tuple(self.orig_shape)}: use a group_size that divides {math.prod(self.orig_shape[1:])}"
            )
        chosen = rows.view(first, rows.shape[0] // first, -1)[indexes].flatten(0, 1)
        return self._decoded(chosen, bits, (len(indexes), *self.orig_shape[1:]), fp_out)

    def _rows(self, codes, bits, scale):
        """Codes and scales side by side."""
        width = self.group_size * bits // 8
        if scale is None:
            return codes.reshape(-1, width + _SCALE_BYTES)
        scale = scale.reshape(-1, 1).float().contiguous() if scale.is_floating_point() else scale.contiguous()
        numbers = scale.view(torch.float32)
        if not bool((torch.isfinite(numbers) & (numbers != 0)).all()):
            raise ValueError("scale has zeros, infinities or NaNs: each scale is a finite non-zero number")
        codes = codes.reshape(-1, width)
        if codes.shape[0] != numbers.numel():
            raise ValueError(f"{codes.shape[0]} groups of codes have {numbers.numel()} scales: each group has one")
        return torch.cat((codes, scale.view(torch.uint8).view(-1, _SCALE_BYTES).to(codes.device)), 1)

    def _decoded(self, rows, bits, shape, fp_out):
        if rows.shape[0] * self.group_size != math.prod(shape):
            raise ValueError(
                f"{rows.shape[0]} groups of {self.group_size} elements are not the {math.prod(shape)} elements of a "
                f"tensor of shape {tuple(shape)}"
            )
        out = decode_rows(rows, self.group_size, bits, self.orig_dtype if fp_out is None else fp_out.dtype)
        return out.view(shape) if fp_out is None else fp_out.copy_(out.view(shape))
