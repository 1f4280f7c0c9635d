"""The cross entropy of logits that exist, in blocks of rows: fp32 copies of the logits exist for one block at a time."""

import torch

from deepspeed.sequence.causal_loss import CausalLMLoss, check_reduction, install_loss
from deepspeed.sequence.tiled import _apply, _Tiles, block_sizes

_BLOCK_BYTES = 64 << 20  # of the fp32 copy of a block, where block_rows is not given
_BACKENDS = ("auto", "torch")


def chunked_cross_entropy(logits, target, ignore_index=-100, reduction="mean", block_rows=None, backend="auto"):
    """``torch.nn.functional.cross_entropy(logits.float(), target)`` without an fp32 copy of all logits.

    Backward computes each block again and leaves the gradient in the logits' dtype.

    Args:
        logits: ``[..., vocabulary]``. target: ``[...]``, class numbers; those equal to ``ignore_index`` do not count.
        reduction: ``"none"``, ``"mean"`` (over the rows that count; nan where none does, as torch has it) or ``"sum"``.
        block_rows: rows of a block; None: as many as take 64 MB in fp32.
        backend: ``"auto"`` or ``"torch"``.

    Returns a scalar in fp32, or losses of ``target``'s shape.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend is {backend!r}; this build has {' and '.join(map(repr, _BACKENDS))}")
    check_reduction(reduction)
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)}: all but the last size are equal")
    rows, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    if block_rows is None:
        block_rows = max(1, _BLOCK_BYTES // (4 * rows.shape[1]))
    sizes = block_sizes(len(rows), block_rows)
    parts = labels.split(sizes)
    kind = "none" if reduction == "none" else "sum"

    def compute(block, index):
        return torch.nn.functional.cross_entropy(block.float(), parts[index], ignore_index=ignore_index, reduction=kind)

    if reduction == "none":
        return _apply(_Tiles(compute, sizes, 0, join=0), rows, None).view(target.shape)
    total = _apply(_Tiles(compute, sizes, 0, weights=[1] * len(sizes)), rows, None)
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


class ChunkedCausalLMLoss(CausalLMLoss):
    """The ``loss_function`` of a transformers model for causal language modelling, by ``chunked_cross_entropy``."""

    def __init__(self, block_rows=None, backend="auto"):
        self.block_rows, self.backend = block_rows, backend

    def _loss(self, logits, labels, ignore_index, reduction):
        return chunked_cross_entropy(logits, labels, ignore_index, reduction, self.block_rows, self.backend)


def install_chunked_causal_lm_loss(model, block_rows=None, backend="auto"):
    """Gives the transformers model ``model`` a ``ChunkedCausalLMLoss`` as its ``loss_function``; returns the model."""
    return install_loss(model, ChunkedCausalLMLoss(block_rows, backend))
