"""Cross entropy of a sequence that ranks share: each computes its part, all get the losses of all tokens; and of a
vocabulary that ranks share: each has the logits of its words, all get the losses."""

import torch

from deepspeed.sequence.causal_loss import CausalLMLoss, check_reduction, install_loss
from deepspeed.sequence.gradients import parts_of_all
from deepspeed.sequence.loss import IGNORED
from deepspeed.sequence.vocab_slice import slice_of


def vocab_sequence_parallel_cross_entropy(vocab_parallel_logits, target, sp_group):
    """The losses of all tokens, ``[sequence, batch]``, on every rank of ``sp_group``.

    ``vocab_parallel_logits``: ``[part of the sequence, batch, vocabulary]`` with the whole vocabulary; ``target``:
    ``[part of the sequence, batch]``. The gradient is this rank's part of that of the losses; where an engine trains on
    ``sp_group``, of the sum over its ranks, as the engine averages over them.
    """
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {tuple(vocab_parallel_logits.shape)} need targets of shape "
            f"{tuple(vocab_parallel_logits.shape[:-1])}, got {tuple(target.shape)}"
        )
    log_probs = vocab_parallel_logits.float().log_softmax(-1)
    return parts_of_all(-log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1), sp_group)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits,
    target,
    tp_group=None,
    sp_group=None,
    vocab_start_index=None,
    vocab_end_index=None,
    ignore_index=IGNORED,
    reduction="none",
    label_smoothing=0.0,
    overwrite_logits=False,
):
    """``torch.nn.functional.cross_entropy`` of logits of which each rank of ``tp_group`` has some words. No rank ever
    has all of them: the ranks exchange a few numbers for each token (Shoeybi et al., "Megatron-LM", 2019).

    Args:
        vocab_parallel_logits: ``[..., words of this rank]``, any floating-point dtype; the ranks have the words in rank
            order.
        target: ``[...]``, numbers of words; tokens whose target is ``ignore_index`` do not count.
        tp_group: torch's group of the ranks that share the vocabulary; None: this job's tensor-parallel group.
        sp_group: ranks that share the sequence along the first dimension: all get the losses of all tokens, as from
            ``vocab_sequence_parallel_cross_entropy``. None: the sequence is whole.
        vocab_start_index, vocab_end_index: checked against the widths of the ranks' logits.
        reduction: ``"none"``, ``"mean"`` (over the tokens that count) or ``"sum"``.
        overwrite_logits: backward writes the gradient over the logits, whose values are lost.

    Returns losses in fp32, ``target``'s shape or a scalar, on every rank. ValueError for a target outside of the
    vocabulary; on a GPU its loss is NaN.
    """
    words = slice_of(vocab_parallel_logits, tp_group, vocab_start_index, vocab_end_index)
    losses = losses_of(words, vocab_parallel_logits, target, ignore_index, label_smoothing, overwrite_logits)
    counts = target.ne(ignore_index)
    if sp_group is not None:
        losses, counts = parts_of_all(losses, sp_group), parts_of_all(counts.to(losses.dtype), sp_group)
    return reduced(losses, counts, reduction)


def losses_of(words, logits, target, ignore_index=IGNORED, label_smoothing=0.0, overwrite=False):
    """The loss of each token, zero where it does not count. ``words``: the ``VocabSlice`` of this rank's ``logits``."""
    normalizers, picked, totals = words.sums(logits, target, ignore_index, overwrite)
    losses = normalizers - picked
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * (normalizers - totals / words.words)
    return losses.masked_fill(target.to(losses.device).eq(ignore_index), 0.0)


def reduced(losses, counts, reduction):
    """``losses``, or their sum or mean; the mean is over the ``counts`` that are true, nan where none is."""
    check_reduction(reduction)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


class VocabParallelCrossEntropyLoss(torch.nn.Module):
    """``torch.nn.CrossEntropyLoss`` by ``vocab_parallel_cross_entropy``, which documents the arguments."""

    def __init__(
        self,
        tp_group=None,
        sp_group=None,
        vocab_start_index=None,
        vocab_end_index=None,
        ignore_index=IGNORED,
        reduction="mean",
        label_smoothing=0.0,
    ):
        super().__init__()
        check_reduction(reduction)
        self.given = (tp_group, sp_group, vocab_start_index, vocab_end_index, ignore_index, reduction, label_smoothing)

    def forward(self, vocab_parallel_logits, target):
        """vocab_parallel_logits: ``[..., words of this rank]``; target: ``[...]``; the loss is in fp32."""
        return vocab_parallel_cross_entropy(vocab_parallel_logits, target, *self.given)


class VocabParallelCausalLMLoss(CausalLMLoss):
    """The ``loss_function`` of a transformers model for causal language modelling whose head gives this rank's
    words."""

    def __init__(self, tp_group=None, sp_group=None, vocab_start_index=None, vocab_end_index=None):
        self.given = (tp_group, sp_group, vocab_start_index, vocab_end_index)

    def _loss(self, logits, labels, ignore_index, reduction):
        return vocab_parallel_cross_entropy(logits, labels, *self.given, ignore_index, reduction)


def configure_vocab_parallel_loss(model, tp_group=None, sp_group=None, vocab_start_index=None, vocab_end_index=None):
    """Gives the transformers model ``model`` a ``VocabParallelCausalLMLoss`` as its ``loss_function``, and returns the
    model. ``tensor_parallel.vocab_parallel_lm_head`` needs no such call. ValueError for a model without a
    ``loss_function``."""
    return install_loss(model, VocabParallelCausalLMLoss(tp_group, sp_group, vocab_start_index, vocab_end_index))
