"""Attention of a vision tower over patches that ranks share."""

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.sequence import exchange
from deepspeed.sequence.gradients import gathered


class UlyssesSPViTAttention(nn.Module):
    """``attn``, any attention module of ``[batch, tokens, features]``, over patches that the ranks of ``process_group``
    share: each gives its part and gets the output for its part. ``has_cls_token``: the first token of every part is the
    class token, the same on all ranks, and counted once.
    """

    def __init__(self, attn, process_group, has_cls_token=True):
        super().__init__()
        self.attn, self.process_group, self.has_cls_token = attn, process_group, has_cls_token

    def forward(self, hidden_states, **kwargs):
        world = dist.get_world_size(self.process_group)
        if world == 1:
            return self.attn(hidden_states, **kwargs)
        if hidden_states.dim() != 3:
            raise ValueError(
                f"the patches of a vision tower are [batch, tokens, features], got shape {tuple(hidden_states.shape)}"
            )
        # In every call: all ranks ask, or none.
        exchange.check_lengths(hidden_states.shape[1], self.process_group, hidden_states.device)
        first = 1 if self.has_cls_token else 0
        own, patches = hidden_states[:, :first], hidden_states[:, first:]
        whole = torch.cat((own, gathered(patches, self.process_group, 1)), dim=1)
        found = self.attn(whole, **kwargs)
        output = found[0] if isinstance(found, tuple) else found
        count = patches.shape[1]
        start = first + dist.get_rank(self.process_group) * count
        output = torch.cat((output[:, :first], output[:, start : start + count]), dim=1)
        return (output, *found[1:]) if isinstance(found, tuple) else output
