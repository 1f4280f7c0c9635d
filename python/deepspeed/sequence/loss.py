"""The loss of a whole sequence from those of its parts."""

import torch

from deepspeed import comm as dist
from deepspeed.sequence.gradients import summed
from deepspeed.utils import groups

IGNORED = -100


def weighted_loss(loss, shift_labels, group=None):
    """The mean over all labels of the whole sequence, on every rank that has a part of it.

    ``loss``: the mean over the labels of this rank's part; what it is where ``shift_labels`` (-100: none) has no label
    does not matter. ``group``: the ranks that share the sequence, by default those of the job. 0 where no rank has a
    label. An engine's gradient of it is that of the whole sequence.
    """
    group = groups._get_sequence_parallel_group() if group is None else group
    labels = (shift_labels != IGNORED).sum()
    if dist.get_world_size(group) == 1:
        return torch.where(labels > 0, loss, torch.zeros_like(loss))
    own = torch.where(labels > 0, loss * labels, torch.zeros_like(loss))
    counts = labels.clone()
    dist.all_reduce(counts, group=group)
    return summed(own, group) / counts.clamp(min=1)
