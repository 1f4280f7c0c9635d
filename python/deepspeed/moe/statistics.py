"""Statistics of a layer's experts since the last step, as one row of numbers that ranks add up."""

import torch

_SAMPLE = 256  # tokens of a forward from which the entropy is computed
_NUMBERS = ("tokens", "dropped", "entropy", "sampled", "aux_loss", "forwards", "bytes", "ms")


class LayerStatistics:
    """Statistics of one layer on this rank. ``counting`` is on in the engine's forwards in training, without
    recomputations. Bytes of exchanges are always counted.

    ``row``: rows that each expert was chosen for, then the numbers of ``_NUMBERS``.
    """

    def __init__(self, num_experts):
        self.num_experts = num_experts
        self.counting = False
        self.row = self._zeros()

    def _zeros(self):
        return torch.zeros(self.num_experts + len(_NUMBERS), dtype=torch.float64)

    def _add(self, name, value):
        self.row[self.num_experts + _NUMBERS.index(name)] += value

    def see(self, routes):
        """Adds the routes of one forward."""
        if not self.counting:
            return
        self.row = self.row.to(routes.probs.device)
        self.row[: self.num_experts] += routes.exp_counts
        kept = torch.as_tensor(routes.plan.kept, device=self.row.device)
        probs = routes.probs.detach()[:: max(1, routes.tokens // _SAMPLE)]
        numbers = {
            "tokens": routes.tokens,
            "dropped": routes.exp_counts.sum() - kept.sum(),
            "entropy": -torch.special.xlogy(probs, probs).sum(),
            "sampled": len(probs),
            "aux_loss": routes.l_aux.detach(),
            "forwards": 1,
        }
        for name, value in numbers.items():
            self._add(name, value)

    def see_bytes(self, count):
        """Adds ``count`` bytes that this rank has sent."""
        self._add("bytes", count)

    def see_seconds(self, seconds):
        """Adds the seconds that this rank has waited for rows of others."""
        self._add("ms", 1000 * seconds)

    def waited(self):
        """Milliseconds of ``see_seconds`` since the row began."""
        return float(self.row[self.num_experts + _NUMBERS.index("ms")])

    def take(self):
        """Returns the row and starts a new one."""
        row, self.row = self.row, self._zeros()
        return row


def traffic_of(row):
    """The numbers of a row that tell of exchanges, a view."""
    return row[-_NUMBERS[::-1].index("bytes") - 1 :]


def summary(row, num_experts, ranks):
    """The numbers of ``engine.moe_statistics()`` of one layer, from the sum of its rows over ``ranks`` ranks."""
    counts = [int(count) for count in row[:num_experts]]
    numbers = dict(zip(_NUMBERS, row[num_experts:].tolist(), strict=True))
    rows = sum(counts)
    return {
        "tokens_per_expert": counts,
        "tokens": int(numbers["tokens"]),
        "dropped_share": numbers["dropped"] / rows if rows else 0.0,
        "router_entropy": numbers["entropy"] / numbers["sampled"] if numbers["sampled"] else 0.0,
        "busiest_over_mean": max(counts) * num_experts / rows if rows else 0.0,
        "aux_loss": numbers["aux_loss"] / numbers["forwards"] if numbers["forwards"] else 0.0,
        "exchange_bytes": int(numbers["bytes"]),
        "exchange_ms": numbers["ms"] / ranks,
    }
