"""Log-probabilities, entropies and divergences of logits of which each rank has some words of the vocabulary.

Each function takes logits of the shape ``[..., words of this rank]`` and gives fp32 of the shape ``[...]``, alike on
every rank of ``tp_group`` (None: this job's tensor-parallel group), with gradients. No rank ever has the logits of all
words.
"""

from deepspeed._native import _C
from deepspeed.sequence.vocab_slice import slice_of


def vocab_parallel_logprobs(vocab_parallel_logits, target, tp_group=None, vocab_start_index=None, vocab_end_index=None):
    """The logarithm of the probability of each ``target``, ``[...]``, numbers of words of the whole vocabulary."""
    words = slice_of(vocab_parallel_logits, tp_group, vocab_start_index, vocab_end_index)
    normalizers, picked, _ = words.sums(vocab_parallel_logits, target, ignore_index=-1)
    return (picked - normalizers).masked_fill(target.eq(-1), 0.0)


def vocab_parallel_entropy(vocab_parallel_logits, tp_group=None, vocab_start_index=None, vocab_end_index=None):
    """The entropy of each token's distribution over the words, in nats."""
    own = _OwnLogprobs(
        slice_of(vocab_parallel_logits, tp_group, vocab_start_index, vocab_end_index), vocab_parallel_logits
    )
    return -own.expected(own.logprobs)


def vocab_parallel_kl_div(
    vocab_parallel_logits, reference_logits, tp_group=None, vocab_start_index=None, vocab_end_index=None
):
    """The Kullback-Leibler divergence, in nats, of each token's distribution from that of ``reference_logits``, which
    have the same shape: the sum over the words of ``p * (log p - log q)``, where p is of ``vocab_parallel_logits``."""
    if vocab_parallel_logits.shape != reference_logits.shape:
        raise ValueError(
            f"logits of shape {tuple(vocab_parallel_logits.shape)} need reference_logits of that shape, got "
            f"{tuple(reference_logits.shape)}"
        )
    words = slice_of(vocab_parallel_logits, tp_group, vocab_start_index, vocab_end_index)
    own, other = _OwnLogprobs(words, vocab_parallel_logits), _OwnLogprobs(words, reference_logits)
    return own.expected(own.logprobs - other.logprobs)


class _OwnLogprobs:
    """Log-probabilities of this rank's words."""

    def __init__(self, words, logits):
        self.words = words
        normalizers = _C.share_over_ranks(words.ranks, words.sums(logits)[0])
        self.logprobs = logits.to(normalizers.dtype) - normalizers.unsqueeze(-1)

    def expected(self, values):
        """The mean over all words of this rank's ``values`` of its words, weighted by their probabilities."""
        weighted = self.logprobs.exp() * values
        weighted = weighted.masked_fill(self.logprobs.isneginf(), 0.0)  # words that are ruled out
        return _C.reduce_over_ranks(self.words.ranks, weighted.sum(-1))
