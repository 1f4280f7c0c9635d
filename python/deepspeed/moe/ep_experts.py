"""Experts as three stacked weights, under the published import path."""

import torch
from torch.nn import functional as F

from deepspeed.moe.errors import fail
from deepspeed.moe.grouped import stacked_product
from deepspeed.zero.gathers.linear import exact_linear


def _run_experts_grouped_mm(w1, w2, w3, x, num_tokens_per_expert):
    """The next ``num_tokens_per_expert[e]`` rows of ``x`` through expert e: ``(silu(x w1') * (x w3')) w2'``.

    w1, w3: [experts, hidden_dim, dim], w2: [experts, dim, hidden_dim]; w3 None: ``silu(x w1') w2'``. Rows behind the
    last expert's are padding, and zeros in the result.
    """
    rows = [int(count) for count in num_tokens_per_expert]
    used = sum(rows)
    if len(rows) != len(w1) or used > len(x):
        fail("", f"{len(w1)} experts and {len(x)} rows: num_tokens_per_expert has {len(rows)} numbers, {used} in all")
    given = x[:used].to(w1.dtype)
    hidden = F.silu(stacked_product(given, rows, w1))
    if w3 is not None:
        hidden = hidden * stacked_product(given, rows, w3)
    out = stacked_product(hidden, rows, w2).to(x.dtype)
    return out if used == len(x) else F.pad(out, (0, 0, 0, len(x) - used))


class GroupedExperts(torch.nn.Module):
    """``num_experts`` gated feed-forward layers of one shape in three parameters, ``w1``, ``w2`` and ``w3``.

    ``use_grouped_mm`` False runs them one after the other, with torch's products. ``disable_triton_grouped_mm`` is
    accepted: the grouped product is a kernel of this library.
    """

    def __init__(self, dim, hidden_dim, num_experts, use_grouped_mm=True, disable_triton_grouped_mm=False):
        super().__init__()
        shape = num_experts, hidden_dim, dim
        w1, w2, w3 = torch.empty(shape), torch.empty(num_experts, dim, hidden_dim), torch.empty(shape)
        self._hold(w1, w2, w3, use_grouped_mm, disable_triton_grouped_mm)
        self.init_weights(0.02)

    def _hold(self, w1, w2, w3, use_grouped_mm, disable_triton_grouped_mm):
        self.num_experts, self.use_grouped_mm = len(w1), use_grouped_mm
        self.disable_triton_grouped_mm = disable_triton_grouped_mm
        self.w1, self.w2 = torch.nn.Parameter(w1), torch.nn.Parameter(w2)
        self.register_parameter("w3", None if w3 is None else torch.nn.Parameter(w3))

    @classmethod
    def of_weights(cls, w1, w2, w3, use_grouped_mm=True, disable_triton_grouped_mm=False):
        """Experts with these weights, which become parameters; w3 None: they make ``silu(x w1') w2'``."""
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._hold(w1, w2, w3, use_grouped_mm, disable_triton_grouped_mm)
        return made

    def init_weights(self, init_std):
        """Normal numbers: ``w1`` of 0.02, ``w2`` and ``w3`` of ``init_std``, cut at two of them."""
        for weight, std in ((self.w1, 0.02), (self.w2, init_std), (self.w3, init_std)):
            if weight is not None:
                torch.nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, x, num_tokens_per_expert):
        """The next ``num_tokens_per_expert[e]`` rows of ``x`` through expert e."""
        if self.use_grouped_mm:
            return _run_experts_grouped_mm(self.w1, self.w2, self.w3, x, num_tokens_per_expert)
        rows = [int(count) for count in num_tokens_per_expert]
        out = []
        for number, part in enumerate(x[: sum(rows)].split(rows)):
            hidden = F.silu(exact_linear(part, self.w1[number]))
            if self.w3 is not None:
                hidden = hidden * exact_linear(part, self.w3[number])
            out.append(exact_linear(hidden, self.w2[number]))
        return F.pad(torch.cat(out), (0, 0, 0, len(x) - sum(rows)))
