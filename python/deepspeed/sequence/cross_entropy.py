"""Cross entropy of a sequence that ranks share: each computes its part, all get the losses of all tokens."""

import torch

from deepspeed.sequence.gradients import own_part, parts_of_all


class _VocabSequenceParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_seq_parallel_logits, target, sp_group):
        log_probs = vocab_seq_parallel_logits.float().log_softmax(-1)
        loss = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(log_probs, target)
        ctx.group, ctx.dtype = sp_group, vocab_seq_parallel_logits.dtype
        return parts_of_all(loss, sp_group)

    @staticmethod
    def backward(ctx, grad_output):
        log_probs, target = ctx.saved_tensors
        scale = own_part(grad_output, ctx.group).unsqueeze(-1)
        grad = log_probs.exp() * scale
        grad.scatter_add_(-1, target.unsqueeze(-1), -scale)
        return grad.to(ctx.dtype), None, None


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
    return _VocabSequenceParallelCrossEntropy.apply(vocab_parallel_logits, target, sp_group)
