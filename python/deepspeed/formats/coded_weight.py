"""Weights that a checkpoint has as small floats ([Note: small floats] in csrc/kernels/codes.h), decoded while they are
read."""

import torch

from deepspeed.formats.weight_files import StoredWeight

MANTISSA_BITS = {4: 1, 6: 2, 8: 3, 12: 7}  # by bits of a code: e2m1, e3m2, e4m3, e4m7
_CODE_UNITS = {4: (2, 1), 6: (4, 3), 8: (1, 1), 12: (2, 3)}  # codes that fill whole bytes, and how many bytes
_CODE_ROWS_AT_ONCE = 4096


def _numbers_of_codes(bits):
    """The number that each code stands for, fp32 ``[2 ** bits]``."""
    mantissa = MANTISSA_BITS[bits]
    exponents = bits - 1 - mantissa
    least, found = 2 - 2 ** (exponents - 1), []
    for code in range(2 ** (bits - 1)):
        exponent, fraction = code >> mantissa, code % 2**mantissa
        size = fraction if exponent == 0 else (fraction + 2**mantissa) * 2.0 ** (exponent - 1)
        found.append(size * 2.0 ** (least - mantissa))
    return torch.tensor(found + [-number for number in found])


class CodedWeight(StoredWeight):
    """A weight of rows of codes, each with an fp32 scale behind them; the codes are in memory while it is read.

    codes: the ``StoredWeight`` of the rows, uint8. facts: ``shape``, ``dtype``, ``q_bits`` and ``group_size``, as
    checkpoints have them under ``quantized_params``. dtype: of the values; None: as in ``facts``. ValueError for facts
    that do not fit the codes.
    """

    def __init__(self, codes, facts, dtype=None):
        self.codes, self.bits, self.group = codes, facts["q_bits"], facts["group_size"]
        self.shape, self.dtype = torch.Size(facts["shape"]), dtype or getattr(torch, facts["dtype"])
        self.pieces = [codes]
        rows = -(-self.shape.numel() // self.group)
        if self.bits not in _CODE_UNITS or tuple(codes.shape) != (rows, self.group * self.bits // 8 + 4):
            raise ValueError(
                f"codes of shape {tuple(codes.shape)} are not a weight of shape {tuple(self.shape)} in groups of "
                f"{self.group} elements of {self.bits} bits: the checkpoint is damaged"
            )

    def _parts(self):
        numbers, rows, left = _numbers_of_codes(self.bits), self.codes.contiguous(), self.shape.numel()
        for some in rows.split(_CODE_ROWS_AT_ONCE):
            values = self._decoded(some, numbers).view(-1)[:left]
            left -= values.numel()
            yield values

    def _decoded(self, rows, numbers):
        count, size = _CODE_UNITS[self.bits]
        scales, units = rows[:, -4:].contiguous().view(torch.float32), rows[:, :-4].reshape(-1, size).int()
        words = sum(units[:, byte] << 8 * byte for byte in range(size))
        codes = torch.stack([words >> self.bits * place & 2**self.bits - 1 for place in range(count)], 1)
        return numbers[codes.long()].view(len(rows), self.group) * scales


def decoded_weights(weights, facts, dtype=None):
    """Returns ``weights``, ``{name: StoredWeight}``, and decodes those that ``facts``, ``{name: facts}`` or None, say
    are codes; tied names keep one object. ``dtype``: as in ``CodedWeight``."""
    made = {id(weights[name]): CodedWeight(weights[name], one, dtype) for name, one in (facts or {}).items()
            if name in weights}  # fmt: skip
    return {name: made.get(id(weight), weight) for name, weight in weights.items()}
