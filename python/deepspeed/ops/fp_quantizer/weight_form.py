"""Tensors of any number of elements as rows of small floats, one row for each group."""

import dataclasses

import torch

from deepspeed.ops.fp_quantizer.quantize import checked_bits, decode_rows, encode_rows


@dataclasses.dataclass(frozen=True)
class WeightForm:
    """The form of a tensor that lies in rows of codes: its ``shape`` and ``dtype``, the bits of a code, and how many
    elements share a scale. The last group is filled up with zeros."""

    shape: torch.Size
    dtype: torch.dtype
    q_bits: int = 8
    group_size: int = 512

    @property
    def groups(self):
        return -(-self.shape.numel() // self.group_size)

    @property
    def row_bytes(self):
        return self.group_size * self.q_bits // 8 + 4

    def encode(self, tensor):
        """Codes of a tensor of this shape: uint8 ``[groups, row_bytes]``."""
        flat, rest = tensor.detach().reshape(-1), self.groups * self.group_size - tensor.numel()
        return encode_rows(torch.nn.functional.pad(flat, (0, rest)) if rest else flat, self.group_size, self.q_bits)

    def decode(self, rows, dtype=None):
        """The tensor that ``rows`` are codes of, in ``dtype``, or its own."""
        flat = decode_rows(rows, self.group_size, self.q_bits, dtype or self.dtype).view(-1)
        return flat[: self.shape.numel()].view(self.shape)

    def facts(self):
        """The same in values that JSON holds, as ``formats.float_codes.CodedWeight`` takes them."""
        return {**dataclasses.asdict(self), "shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}


def form_of(param):
    """The ``WeightForm`` of a parameter whose values are codes (``deepspeed.linear.QuantizedParameter``); None for any
    other. Of a parameter of which each rank has some rows it is that of the whole."""
    quantizer, config = (vars(param).get(key) for key in ("quantizer", "quantization_config"))
    if quantizer is None or config is None or quantizer.orig_shape is None:
        return None
    return WeightForm(quantizer.orig_shape, quantizer.orig_dtype, checked_bits(config.q_bits, config.mantissa_bits),
                      config.group_size)  # fmt: skip


def coded_params(weights):
    """``{name: facts}`` of those of ``weights``, ``{name: parameter}``, that are codes."""
    forms = ((name, form_of(param)) for name, param in weights.items())
    return {name: form.facts() for name, form in forms if form is not None}
