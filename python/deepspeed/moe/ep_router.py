"""The router of models whose tokens choose experts by scores, within groups of experts; a published import path."""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from deepspeed._compat import without_autocast
from deepspeed.moe.errors import fail


class Choice(NamedTuple):
    """The output of a router: ``logits`` and ``probs`` [tokens, experts] (scores, whose sum may differ from 1), and for
    the chosen experts ``scores`` and ``experts`` [tokens, top_k]."""

    logits: torch.Tensor
    probs: torch.Tensor
    scores: torch.Tensor
    experts: torch.Tensor


class Fp32Linear(torch.nn.Linear):
    """A linear layer that computes in fp32, whatever type its weight has."""

    def forward(self, input):
        with without_autocast(input.device.type):
            return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class TokenChoiceTopKRouter(torch.nn.Module):
    """Each token goes to the ``top_k`` experts with the largest scores.

    Args:
        dim: width of a token. num_experts: how many there are. num_expert_groups, num_limited_groups: experts lie in
            num_expert_groups groups of neighbours, and a token chooses among those of the num_limited_groups groups
            with the largest group score; None: among all.
        score_func: scores are the "softmax" or the "sigmoid" of what the gate says, in fp32. route_norm: the scores of
        a token's experts are divided by their sum. route_scale: then they are multiplied by this. gate_bias: whether
        the gate has a bias. group_score_func: a group's score is the "max" of its experts' or the sum of the two
        largest, "top2_sum".
    """

    def __init__(
        self,
        dim,
        num_experts,
        num_expert_groups,
        num_limited_groups,
        top_k,
        score_func,
        route_norm,
        route_scale,
        gate_bias,
        group_score_func="top2_sum",
    ):
        super().__init__()
        if score_func not in ("softmax", "sigmoid"):
            fail("", f"score_func={score_func!r}: it is 'softmax' or 'sigmoid'")
        if group_score_func not in ("max", "top2_sum"):
            fail("", f"group_score_func={group_score_func!r}: it is 'max' or 'top2_sum'")
        if not 1 <= top_k <= num_experts:
            fail("", f"top_k={top_k}: a token goes to at least one and at most all num_experts={num_experts} experts")
        if num_expert_groups is not None:
            self._check_groups(num_experts, num_expert_groups, num_limited_groups, top_k, group_score_func)
        self.gate = torch.nn.Linear(dim, num_experts, bias=gate_bias)
        self.num_experts, self.top_k = num_experts, top_k
        self.num_expert_groups, self.num_limited_groups = num_expert_groups, num_limited_groups
        self.score_func, self.group_score_func = score_func, group_score_func
        self.route_norm, self.route_scale = route_norm, route_scale

    @staticmethod
    def _check_groups(experts, groups, limited, top_k, score):
        if limited is None:
            fail("", "num_limited_groups must be set when num_expert_groups is set")
        if experts % groups != 0:
            fail("", f"num_experts ({experts}) must be divisible by num_expert_groups ({groups})")
        size = experts // groups
        if not 1 <= limited <= groups or limited * size < top_k:
            text = f"num_limited_groups={limited} of {groups} groups of {size} experts"
            fail("", f"{text} leave too few for top_k={top_k}")
        if score == "top2_sum" and size < 2:
            fail("", f"group_score_func='top2_sum' needs groups of at least two experts, these have {size}")

    def forward(self, x, expert_bias=None):
        """``x``: [tokens, dim]. ``expert_bias`` [num_experts] counts where experts are chosen and nowhere else.

        Returns ``(scores [tokens, top_k], experts [tokens, top_k], tokens of each expert [num_experts])``.
        """
        found = self.route(x, expert_bias)
        counts = torch.bincount(found.experts.reshape(-1), minlength=self.num_experts)
        return found.scores, found.experts, counts

    def route(self, x, expert_bias=None):
        """The same as a ``Choice``."""
        logits = self.gate(x)
        fp32 = logits.float()
        scores = torch.sigmoid(fp32) if self.score_func == "sigmoid" else torch.softmax(fp32, dim=-1)
        choice = scores if expert_bias is None else scores + expert_bias
        if self.num_expert_groups is not None:
            choice = self._within_groups(choice)
        experts = torch.topk(choice, self.top_k, dim=-1)[1]
        chosen = scores.gather(1, experts)
        if self.route_norm:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return Choice(logits, scores, chosen * self.route_scale, experts)

    def _within_groups(self, choice):
        grouped = choice.view(len(choice), self.num_expert_groups, -1)
        scores = grouped.topk(1 if self.group_score_func == "max" else 2, dim=-1)[0].sum(-1)
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept.scatter_(1, scores.topk(self.num_limited_groups, dim=-1)[1], True)
        return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(choice)
