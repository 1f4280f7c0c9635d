"""Cross entropy of a sequence that ranks share: each computes its part, all get the losses of all tokens."""

from deepspeed.sequence.gradients import parts_of_all


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
