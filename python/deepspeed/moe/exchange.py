"""Rows that travel between the ranks that share a layer's experts."""

import contextlib

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.moe.rows import reorder_rows
from deepspeed.moe.statistics import Watch


@contextlib.contextmanager
def named(where):
    """Failures of a collective begin with the layer's name."""
    try:
        yield
    except RuntimeError as e:
        raise RuntimeError(f"MoE layer '{where}': {e}") from e


class _AllToAll(torch.autograd.Function):
    """Equal parts of ``input`` to all ranks of ``group``; None: there is nobody else."""

    @staticmethod
    def forward(ctx, group, input):
        ctx.group = group
        if group is None or dist.get_world_size(group) == 1:
            return input.view_as(input)
        input = input.contiguous()
        output = torch.empty_like(input)
        dist.all_to_all_single(output, input, group=group)
        return output

    @staticmethod
    def backward(ctx, *grad_output):
        return None, _AllToAll.apply(ctx.group, *grad_output)


class _Passage:
    """One exchange: ``given[r]`` rows to rank r, ``taken[r]`` rows from it, begun and waited for apart; so is that of
    the gradients, the other way."""

    def __init__(self, dispatcher, given, taken):
        self.dispatcher, self.given, self.taken = dispatcher, given, taken
        self._work = self._held = None
        self.arriving = None  # the gradients of the rows that were given

    def start(self, rows, given, taken):
        dispatcher = self.dispatcher
        rows = rows.contiguous()
        out = rows.new_empty(sum(taken), *rows.shape[1:])
        with named(dispatcher.where):
            self._work = dist.all_to_all_single(out, rows, taken, given, group=dispatcher.group, async_op=True)
        self._held = rows  # until it has left
        crossing = sum(given) - given[dispatcher.rank]
        dispatcher.statistics.see_bytes(crossing * rows[:1].numel() * rows.element_size())
        return out

    def wait(self):
        watch = Watch()
        with named(self.dispatcher.where):
            self._work.wait()
        self._work = self._held = None
        self.dispatcher.statistics.see_seconds(watch.seconds())


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, passage):
        ctx.passage = passage
        return passage.start(rows, passage.given, passage.taken)

    @staticmethod
    def backward(ctx, grad):  # what comes with it says only that the gradients are on their way
        ctx.passage.wait()
        return ctx.passage.arriving, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, passage):
        ctx.passage = passage
        passage.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        ctx.passage.arriving = ctx.passage.start(grad, ctx.passage.taken, ctx.passage.given)
        return grad, None


def _parts(local_experts, chunks):
    """``[(first, end)]`` of so many parts of a rank's experts, as equal as that goes; none is empty."""
    bounds = [local_experts * c // chunks for c in range(chunks + 1)]
    return [(a, b) for a, b in zip(bounds, bounds[1:]) if b > a]


class PaddedTokenDispatcher:
    """The exchange of one forward in which each expert gets equally many rows of each rank of ``group``, in ``chunks``
    as that of ``TokenDispatcher``."""

    def __init__(self, group, local_experts, statistics, where, chunks):
        self.group, self.where, self.statistics = group, where, statistics
        self.rank = dist.get_rank(group)
        self.parts = _parts(local_experts, chunks)

    def run(self, rows, experts, beside):
        """``rows`` [ranks, local experts, capacity, width] through ``experts(rows of a part, None, first, count)``, in
        the same shape. ``beside`` is called while they travel."""
        ranks, _, capacity, width = rows.shape
        sizes = [b - a for a, b in self.parts]
        away = []
        for (first, _), count, part in zip(self.parts, sizes, rows.split(sizes, dim=1), strict=True):
            each = [count * capacity] * ranks
            passage = _Passage(self, each, each)
            away.append((_Start.apply(part.reshape(-1, width), passage), passage, first, count))
        beside()
        home = []
        for arriving, passage, first, count in away:
            arrived = _Wait.apply(arriving, passage).view(ranks, count, capacity, width)
            back = _Passage(self, passage.taken, passage.given)
            home.append((_Start.apply(experts(arrived, None, first, count).reshape(-1, width), back), back, count))
        return torch.cat(
            [_Wait.apply(made, back).view(ranks, count, capacity, width) for made, back, count in home], dim=1
        )


class TokenDispatcher:
    """The exchange of one forward: what each expert of the group keeps of this rank's rows goes to the rank with the
    expert, runs through it there, and comes back.

    ``kept``: rows of each expert of the group. ``chunks``: the experts of a rank are cut into so many parts; while rows
    of one part run through their experts, those of the next are on their way, forth and back, in the backward, too.
    """

    def __init__(self, kept, local_experts, group, statistics, where="", chunks=1):
        self.group, self.where, self.statistics = group, where, statistics
        self.rank = dist.get_rank(group)
        mine = torch.tensor(kept, dtype=torch.int64)
        theirs = torch.empty_like(mine)
        with named(where):
            dist.all_to_all_single(theirs, mine, group=group)
        ranks = len(kept) // local_experts
        statistics.see_bytes((ranks - 1) * local_experts * mine.element_size())
        self.mine, self.theirs = mine.view(ranks, local_experts), theirs.view(ranks, local_experts)
        self.parts = _parts(local_experts, chunks)

    def order(self, sources, slots):
        """``(sources, slots)`` of rows in the order in which they leave: part by part, in it rank by rank."""
        if len(self.parts) == 1:
            return sources, slots
        ranks, local = self.mine.shape
        runs = sources.split(self.mine.view(-1).tolist())
        sources = torch.cat([runs[r * local + e] for a, b in self.parts for r in range(ranks) for e in range(a, b)])
        slots = torch.full_like(slots, -1)
        slots.view(-1)[sources.long()] = torch.arange(len(sources), dtype=slots.dtype, device=slots.device)
        return sources, slots

    def run(self, rows, experts, beside):
        """The rows, in that order, through ``experts(rows, counts, first expert)``. ``beside`` is called while they
        travel."""
        ranks = len(self.mine)
        givens = [self.mine[:, a:b].sum(1).tolist() for a, b in self.parts]
        away = []
        for (a, b), given, part in zip(self.parts, givens, rows.split([sum(given) for given in givens]), strict=True):
            taken, counts, order = _native._C.plan_arrivals(self.theirs[:, a:b].reshape(-1).tolist(), ranks, b - a)
            passage = _Passage(self, given, taken)
            away.append((_Start.apply(part, passage), passage, counts, order.to(rows.device), a))
        beside()
        home = []
        for arriving, passage, counts, order, first in away:
            ordered, inverse = reorder_rows(_Wait.apply(arriving, passage), order)
            made, _ = reorder_rows(experts(ordered, counts, first), inverse)
            back = _Passage(self, passage.taken, passage.given)
            home.append((_Start.apply(made, back), back))
        return torch.cat([_Wait.apply(arriving, back) for arriving, back in home])
