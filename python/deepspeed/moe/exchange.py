"""Exchanges of rows between the ranks that share a layer's experts."""

import contextlib

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.comm.group_communicators import native_of
from deepspeed.moe.rows import reorder_rows
from deepspeed.ops.token_rows import positions_of
from deepspeed.zero.parameters.sharded_parameter import is_sharded


@contextlib.contextmanager
def named(where):
    """Puts the layer's name in front of the text of a failed collective."""
    try:
        yield
    except RuntimeError as e:
        raise RuntimeError(f"MoE layer '{where}': {e}") from e


class _AllToAll(torch.autograd.Function):
    """Sends equal parts of ``input`` to all ranks of ``group``; None: this rank alone."""

    @staticmethod
    def forward(ctx, group, input):
        ctx.group = group
        if group is None or dist.get_world_size(group) == 1:
            return input.view_as(input)
        ranks = native_of(group, input)
        each = [input.shape[0] // ranks.size] * ranks.size
        return _native._C.exchange_rows(ranks, input, each, each)

    @staticmethod
    def backward(ctx, *grad_output):
        return None, _AllToAll.apply(ctx.group, *grad_output)


def _there_and_back(dispatcher, parts, beside):
    """For each of ``parts``, ``(rows, given, taken, run)``: the rows that arrive go through ``run`` and are sent back.
    ``given[r]`` rows are sent to rank r, ``taken[r]`` rows are received from it. All exchanges are under way before
    ``beside`` is called and the first of them is waited for; the backward exchanges gradients in the same way."""
    told, what = dispatcher.statistics, f"MoE layer '{dispatcher.where}'"

    def started(rows, given, taken):
        ranks = native_of(dispatcher.group, rows)
        exchange = _native._C.RowExchange(ranks, given, taken, what, told.see_bytes, told.see_seconds)
        return exchange, exchange.start(rows)

    away = [started(rows, given, taken) for rows, given, taken, _ in parts]
    beside()
    home = [
        started(run(exchange.wait(arriving)), taken, given)
        for (exchange, arriving), (_, given, taken, run) in zip(away, parts, strict=True)
    ]
    return [exchange.wait(arriving) for exchange, arriving in home]


def _parts(local_experts, chunks):
    """``[(first, end)]`` of at most ``chunks`` parts of a rank's experts, of nearly equal size; none is empty."""
    bounds = [local_experts * c // chunks for c in range(chunks + 1)]
    return [(a, b) for a, b in zip(bounds, bounds[1:]) if b > a]


class PaddedTokenDispatcher:
    """The exchange of one forward in which each expert gets the same number of rows of each rank of ``group``.
    ``chunks``: see ``TokenDispatcher``."""

    def __init__(self, group, local_experts, statistics, where, chunks):
        self.group, self.where, self.statistics = group, where, statistics
        self.parts = _parts(local_experts, chunks)

    def run(self, rows, experts, beside):
        """``rows`` [ranks, local experts, capacity, width] through ``experts(rows of a part, None, first, count)``, in
        the same shape. ``beside`` is called during the exchange."""
        ranks, _, capacity, width = rows.shape
        sizes = [b - a for a, b in self.parts]

        def part(sent, first, count):
            def run(arrived):
                return experts(arrived.view(ranks, count, capacity, width), None, first, count).reshape(-1, width)

            each = [count * capacity] * ranks
            return sent.reshape(-1, width), each, each, run

        parts = [part(sent, a, b - a) for sent, (a, b) in zip(rows.split(sizes, dim=1), self.parts, strict=True)]
        found = _there_and_back(self, parts, beside)
        return torch.cat([one.view(ranks, n, capacity, width) for one, n in zip(found, sizes, strict=True)], dim=1)


class TokenDispatcher:
    """The exchange of one forward: rows that an expert keeps are sent to the rank with that expert, run through it
    there, and are sent back.

    ``kept``: rows of each expert of the group. ``chunks``: the number of parts that a rank's experts are cut into.
    While rows of one part run through their experts, those of the next are exchanged, in backward, too. ``busiest``: in
    a step that is planned, this rank receives this multiple of the rows that are kept for it, at most all.
    """

    def __init__(self, kept, local_experts, group, statistics, where="", chunks=1, busiest=1.0):
        self.group, self.where, self.statistics = group, where, statistics
        mine = torch.tensor(kept, dtype=torch.int64)
        theirs = torch.empty_like(mine)
        with named(where):
            dist.all_to_all_single(theirs, mine, group=group)
        ranks = len(kept) // local_experts
        if busiest > 1:
            theirs = (theirs * min(busiest, ranks)).round().long()
        statistics.see_bytes((ranks - 1) * local_experts * mine.element_size())
        self.mine, self.theirs = mine.view(ranks, local_experts), theirs.view(ranks, local_experts)
        self.parts = _parts(local_experts, chunks)

    def order(self, sources, slots):
        """``(sources, slots)`` of rows in the order in which they are sent: part by part, in a part rank by rank."""
        if len(self.parts) == 1:
            return sources, slots
        ranks, local = self.mine.shape
        runs = sources.split(self.mine.view(-1).tolist())
        sources = torch.cat([runs[r * local + e] for a, b in self.parts for r in range(ranks) for e in range(a, b)])
        return sources, positions_of(sources, slots.numel()).view(slots.shape)

    def run(self, rows, experts, beside):
        """The rows, in that order, through ``experts(rows, counts, first expert)``. ``beside`` is called during the
        exchange."""
        ranks = len(self.mine)

        def part(sent, given, first, end):
            taken, counts, order = _native._C.plan_arrivals(
                self.theirs[:, first:end].reshape(-1).tolist(), ranks, end - first
            )
            order = order.to(rows.device)

            def run(arrived):
                ordered, inverse = reorder_rows(arrived, order)
                return reorder_rows(experts(ordered, counts, first), inverse)[0]

            return sent, given, taken, run

        givens = [self.mine[:, a:b].sum(1).tolist() for a, b in self.parts]
        sent = rows.split([sum(given) for given in givens])
        parts = [part(one, given, a, b) for one, given, (a, b) in zip(sent, givens, self.parts, strict=True)]
        return torch.cat(_there_and_back(self, parts, beside))


def exchange_of(layer, plan):
    """``(sources, slots, run)`` of the rows of one forward of ``layer`` that keeps all tokens; ``run`` is
    ``TokenDispatcher.run``, or runs the experts where one rank has all of them."""
    sources, slots = plan.sources(), plan.slots()
    if layer.ep_size == 1:
        return sources, slots, lambda rows, experts, beside: experts(rows, plan.kept)
    chunks = min(layer.overlap_chunks, layer.num_local_experts)
    dispatcher = TokenDispatcher(
        plan.kept, layer.num_local_experts, layer.ep_group, layer.statistics, layer.layer_name, chunks, layer.busiest
    )
    return *dispatcher.order(sources, slots), dispatcher.run


def with_gradient(rows, experts):
    """``rows``, which require a gradient where ``experts`` are sharded: stage 3 releases them when it is computed."""
    if torch.is_grad_enabled() and not rows.requires_grad and any(map(is_sharded, experts.parameters())):
        return rows.detach().requires_grad_()
    return rows
