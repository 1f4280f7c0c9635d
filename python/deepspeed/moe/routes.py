"""The decisions of a gate for a batch of tokens."""

import math
from fractions import Fraction

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.moe.device_plan import DevicePlan


def capacity_of(tokens, num_experts, factor, min_capacity):
    """Rows that an expert takes: ``ceil(tokens / num_experts * factor)``, at least ``min_capacity``. Exact: a factor of
    1.1 is 11/10."""
    return max(math.ceil(Fraction(tokens, num_experts) * Fraction(repr(float(factor)))), int(min_capacity))


class Routes:
    """The expert and the weight of each choice of each token.

    ``experts``: [tokens, k] int32, -1 for no expert. ``probs``: [tokens, num_experts], the gate's. ``capacity``: rows
    of an expert, None if all are kept. ``priority``: [tokens, k], see csrc/plan/route_plan.h.
    """

    def __init__(self, experts, probs, capacity=None, priority=None, choices_first=False, normalize=False):
        self.experts, self.probs, self.capacity = experts, probs, capacity
        self.tokens, self.k = experts.shape
        self.num_experts = probs.shape[1]
        if capacity is not None and experts.device.type != "cpu":
            self.plan = DevicePlan(experts, self.num_experts, capacity, choices_first, priority)
        else:
            bound = -1 if capacity is None else capacity
            self.plan = _native._C.RoutePlan(experts, self.num_experts, bound, choices_first, priority)
        self.exp_counts = torch.as_tensor(self.plan.wanted, dtype=torch.int64, device=probs.device)
        self.counted, self.loss_scale = self.exp_counts, 1.0  # for the balance loss
        self.l_aux = None
        self._normalize = normalize

    def locations(self):
        """[tokens, k]: number among the rows of its expert, -1 if it was dropped."""
        return self.plan.location().long()

    def weights(self):
        """[tokens, k] fp32: 0 for dropped choices; with k > 1 the weights of a token add up to 1."""
        kept = self.plan.location() >= 0
        weights = self.probs.gather(1, self.experts.long().clamp(min=0)) * kept
        if self._normalize:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        return weights

    def balance_loss(self, group=None):
        """``num_experts * sum of (mean probability x share of tokens)`` over experts; the shares are those of all
        ranks of ``group``, where there is one."""
        tokens = max(self.tokens, 1)
        counts = torch.cat([self.counted, self.counted.new_tensor([self.tokens])]).to(self.probs.dtype)
        if group is not None:
            dist.all_reduce(counts, group=group)
        share = counts[:-1] / counts[-1].clamp(min=1)
        return (self.probs.sum(0) / tokens * share).sum() * (self.num_experts * self.loss_scale)

    def masks(self, capacity):
        """``(combine weights, dispatch mask)``, both [tokens, num_experts, capacity], with padding."""
        locations = self.locations()
        token, choice = (locations >= 0).nonzero(as_tuple=True)
        where = token, self.experts.long()[token, choice], locations[token, choice]
        shape = self.tokens, self.num_experts, capacity
        combine = self.probs.new_zeros(shape).index_put(where, self.weights()[token, choice])
        dispatch = torch.zeros(shape, dtype=torch.bool, device=combine.device)
        dispatch[where] = True
        return combine, dispatch
