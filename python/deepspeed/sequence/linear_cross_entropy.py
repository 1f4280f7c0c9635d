"""A head and its cross entropy in blocks of rows: the logits exist for one block at a time."""

import torch

from deepspeed._native import _C
from deepspeed.sequence.cross_entropy import losses_of, reduced
from deepspeed.sequence.loss import IGNORED
from deepspeed.sequence.tiled import _apply, _Tiles, block_sizes
from deepspeed.sequence.vocab_slice import slice_of


def vocab_parallel_linear_cross_entropy(
    hidden,
    weight,
    target,
    tp_group=None,
    vocab_start_index=None,
    vocab_end_index=None,
    ignore_index=IGNORED,
    reduction="mean",
    bias=None,
    block_rows=None,
):
    """``vocab_parallel_cross_entropy(linear(hidden, weight, bias), target)`` whose logits exist for ``block_rows`` rows
    at a time; backward computes them again.

    Args:
        hidden: ``[..., features]``, alike on the ranks of ``tp_group``, as is its gradient.
        weight: ``[words of this rank, features]``, a leaf; backward adds to its ``grad``. bias: ``[words of this
            rank]``.
        target: ``[...]``, numbers of words; those that are ``ignore_index`` do not count.
        block_rows: None: as many as give this rank about as many logits as ``hidden`` has elements.

    Returns fp32: a scalar, or losses of ``target``'s shape with ``reduction="none"``.
    """
    if hidden.shape[:-1] != target.shape or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and target {tuple(target.shape)} do not fit: "
            "they are [..., features], [words of this rank, features] and [...]"
        )
    words = slice_of(weight.t(), tp_group, vocab_start_index, vocab_end_index)
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    if block_rows is None:
        block_rows = max(1, rows.numel() // max(1, weight.shape[0]))
    sizes = block_sizes(len(rows), block_rows)
    parts = labels.split(sizes)

    def compute(block, index):
        logits = torch.nn.functional.linear(block, weight, bias)
        return losses_of(words, logits, parts[index], ignore_index, overwrite=True)

    tiles = _Tiles(compute, sizes, 0, join=0)
    losses = _apply(tiles, _C.share_over_ranks(words.ranks, rows), [weight] if bias is None else [weight, bias])
    return reduced(losses.view(target.shape), target.ne(ignore_index), reduction)
