"""Plans of routes on the device of the choices, for GPUs: the host does not wait for the device.

The results equal those of csrc/plan/route_plan.h, with one difference: a number that is not an expert's is dropped
without an error. Logits that are NaN give weights that are NaN.
"""

import torch

from deepspeed.ops.token_rows import positions_of

_STABLE = {"dim": 0, "stable": True}


class DevicePlan:
    """``_native._C.RoutePlan`` with a capacity, by sorts on the device. ``wanted`` and ``kept`` are tensors there."""

    def __init__(self, experts, num_experts, capacity, choices_first=False, priority=None):
        self.shape, self.num_experts = experts.shape, num_experts
        tokens, k = experts.shape
        # Choices in their order of arrival; those without an expert get a number behind all experts.
        by_order = (lambda t: t.t().reshape(-1)) if choices_first else (lambda t: t.reshape(-1))
        chosen = by_order(experts).long()
        chosen = torch.where(chosen < 0, num_experts, chosen)
        self.wanted = self._count(chosen)[:-1]
        if priority is None:
            stays = self._positions(chosen) < capacity
        else:
            ranked = by_order(priority.float()).sort(descending=True, **_STABLE).indices
            stays = torch.empty_like(chosen, dtype=torch.bool)
            stays[ranked] = self._positions(chosen[ranked]) < capacity
        chosen = torch.where(stays, chosen, num_experts)
        self.kept = self._count(chosen)[:-1]
        location = torch.where(chosen < num_experts, self._positions(chosen), -1)
        back = (lambda t: t.view(k, tokens).t().contiguous()) if choices_first else (lambda t: t.view(tokens, k))
        self._location, self._experts = back(location), back(chosen)

    def _count(self, chosen):
        """The number of choices of each expert, and last that of choices of none."""
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=chosen.device)
        return counts.scatter_add_(0, chosen, torch.ones_like(chosen))

    def _positions(self, chosen):
        """For each choice the number of earlier choices of the same expert."""
        order, counts = chosen.sort(**_STABLE).indices, self._count(chosen)
        starts = counts.cumsum(0) - counts
        positions = torch.empty_like(chosen)
        positions[order] = torch.arange(len(chosen), device=chosen.device) - starts[chosen[order]]
        return positions

    def location(self):
        return self._location.to(torch.int32)

    def slots(self, capacity):
        return torch.where(self._location >= 0, self._experts * capacity + self._location, -1).to(torch.int32)

    def sources(self, capacity):
        return positions_of(self.slots(capacity), self.num_experts * capacity)
