"""The words of a vocabulary that a rank has where ranks share it, and sums over all words of logits that exist in
slices."""

import dataclasses

import torch

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.comm import mesh_views
from deepspeed.sequence.loss import IGNORED
from deepspeed.utils import groups


@dataclasses.dataclass(frozen=True)
class VocabSlice:
    """``start`` up to ``stop`` of ``words`` words belong to this rank of torch's ``group``, and the others to its other
    ranks, in rank order."""

    group: object
    start: int
    stop: int
    words: int

    @property
    def ranks(self):
        """The native communicator over ``group``."""
        return mesh_views.tensor_ranks(self.group)

    def sums(self, logits, target=None, ignore_index=IGNORED, overwrite=False):
        """``(normalizers, picked, totals)`` in fp32, each of the shape of ``logits`` without its last dimension, alike
        on all ranks, with gradients: the logarithm of the sum over all words of ``exp(logit)``, the logit of ``target``
        (zero where it is ``ignore_index``), and the sum of all logits. ``overwrite``: backward writes the gradient over
        the logits."""
        rows, shape = logits.reshape(-1, logits.shape[-1]), logits.shape[:-1]
        if target is None:
            target = torch.full((len(rows),), ignore_index, dtype=torch.long, device=logits.device)
        elif target.shape != shape:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} need targets of shape {tuple(shape)}, got {tuple(target.shape)}"
            )
        mine, targets = (self.start, self.stop, self.words), target.reshape(-1).to(logits.device, torch.long)
        return tuple(one.view(shape) for one in _C.vocab_sums(self.ranks, mine, rows, targets, ignore_index, overwrite))


def slice_of(logits, tp_group=None, vocab_start_index=None, vocab_end_index=None):
    """The ``VocabSlice`` of this rank, whose logits have the shape (..., words of this rank).

    ``tp_group``: torch's group of the ranks that share the vocabulary; None: the group that this job has for tensor
    parallelism. Every rank of it calls this function, since the ranks tell each other how many words they have.
    ValueError where ``vocab_start_index`` or ``vocab_end_index`` say something else.
    """
    group, width = groups.get_tensor_model_parallel_group() if tp_group is None else tp_group, logits.shape[-1]
    own = torch.tensor([width], device=logits.device)
    widths = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(widths, own, group=group)
    widths, rank = [int(one) for one in widths], dist.get_rank(group)
    start, stop = sum(widths[:rank]), sum(widths[: rank + 1])
    for name, given, found in (("start", vocab_start_index, start), ("end", vocab_end_index, stop)):
        if given not in (None, found):
            raise ValueError(
                f"vocab_{name}_index is {given}, and the ranks of the group have {widths} words, so this one has "
                f"{start} up to {stop}: correct it, or leave it out"
            )
    return VocabSlice(group, start, stop, sum(widths))
