"""Softmax of scores that have some blocks only, and the masks of sparse attention."""

import torch

from deepspeed.ops.sparse_attention.matmul import gathered, places


def _checked(name, mask, sizes):
    if mask.dim() != len(sizes) or any(own not in (1, size) for own, size in zip(mask.shape, sizes)):
        raise ValueError(f"{name} has the shape {tuple(mask.shape)}: it is {tuple(sizes)}, or 1 in any of them")
    return mask


def mask_of(sizes, rpe, key_padding_mask, attn_mask, key_padding_mask_mode, attn_mask_mode):
    """``(biases, where queries look)`` of ``ops.attention`` for scores of ``sizes`` (batch, heads, tokens).

    ``rpe``: two to four dimensions, the last of them ``[heads, tokens, tokens]``. ``key_padding_mask``: ``[batch,
    tokens]``. ``attn_mask``: ``[tokens, tokens]``. Modes: "add" or "mul".
    """
    batch, heads, tokens = sizes
    pairs, padding, looks = None, None, None
    if rpe is not None:
        whole = rpe[(None,) * (4 - rpe.dim())] if rpe.dim() < 4 else rpe
        pairs = _checked("rpe", whole, (batch, heads, tokens, tokens))
    if attn_mask is not None:
        _checked("attn_mask", attn_mask, (tokens, tokens))
        if attn_mask_mode == "mul":
            looks = attn_mask.ne(0).expand(tokens, tokens)[None, None]
        else:
            pairs = attn_mask[None, None] if pairs is None else pairs + attn_mask
    if key_padding_mask is not None:
        _checked("key_padding_mask", key_padding_mask, (batch, tokens))
        if key_padding_mask_mode == "mul" and looks is None:
            looks = key_padding_mask.ne(0).expand(-1, tokens)[:, None, None]
        elif key_padding_mask_mode == "mul":
            hidden = torch.zeros_like(key_padding_mask, dtype=torch.float32).masked_fill(
                key_padding_mask.eq(0), float("-inf")
            )
            padding = hidden[:, None, None]
        else:
            padding = key_padding_mask[:, None, None]
    return [one for one in (pairs, padding) if one is not None], looks


def _numbers_of_rows(layout):
    """The numbers of the blocks in each row of each head ``[heads * rows, most blocks of a row]``; the number of all
    blocks stands for none."""
    counts = layout.sum(-1).flatten()
    places_in_row = torch.arange(max(int(counts.max()), 1))
    numbers = (counts.cumsum(0) - counts).unsqueeze(1) + places_in_row
    return numbers.masked_fill(places_in_row >= counts.unsqueeze(1), int(counts.sum()))


class Softmax:
    """Softmax over the keys of the blocks of ``layout`` (``[heads, rows, columns]``), stored as in ``MatMul``."""

    def __init__(self, layout, block, bench=False):
        self.layout, self.block, self.bench = layout.detach().ne(0).cpu(), block, bench
        self._where = places(self.layout)
        self._of_rows = _numbers_of_rows(self.layout)

    def __call__(
        self,
        x,
        scale=1.0,
        rpe=None,
        key_padding_mask=None,
        attn_mask=None,
        key_padding_mask_mode="add",
        attn_mask_mode="add",
    ):
        """``softmax(x * scale + rpe + masks)`` of scores ``[batch, blocks, block, block]``. Masks: see ``mask_of``;
        modes "add" or "mul", where a 0 hides a key. A query that sees no key gets zeros."""
        heads, rows, columns = self.layout.shape
        if x.dim() != 4 or x.shape[1:] != (len(self._where[0]), self.block, self.block):
            raise ValueError(
                f"scores have the shape {tuple(x.shape)}: the layout has {len(self._where[0])} blocks of {self.block}"
            )
        where = [one.to(x.device) for one in self._where]
        tokens = columns * self.block
        sizes = (x.shape[0], heads, tokens)
        biases, looks = mask_of(sizes, rpe, key_padding_mask, attn_mask, key_padding_mask_mode, attn_mask_mode)
        scores = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
        for bias in biases:
            scores = scores + self._of_blocks(bias, sizes, where)
        if looks is not None:
            scores = scores.masked_fill(~self._of_blocks(looks, sizes, where), float("-inf"))
        # The largest score of each row of a head, and the sum of its exponentials.
        row = where[0] * rows + where[1]
        high = torch.nn.functional.pad(scores.detach().amax(-1), (0, 0, 0, 1), value=float("-inf"))
        most = high[:, self._of_rows.to(x.device)].amax(2)
        most = most.masked_fill(most == float("-inf"), 0.0)[:, row].unsqueeze(-1)
        parts = (scores - most).exp()
        total = parts.new_zeros(x.shape[0], heads * rows, self.block)
        total = total.index_add(1, row, parts.sum(-1))[:, row].unsqueeze(-1)
        return (parts / total.clamp(min=torch.finfo(parts.dtype).tiny)).to(x.dtype)

    def _of_blocks(self, mask, sizes, where):
        """The blocks of a mask ``[batch or 1, heads or 1, tokens or 1, tokens or 1]``."""
        batch, heads, tokens = sizes
        rows = self.layout.shape[1] * self.block
        return gathered(mask.expand(mask.shape[0], heads, rows, tokens), where, self.block)
