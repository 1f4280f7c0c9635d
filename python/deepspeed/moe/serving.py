"""Layers of experts for inference. They are spread over other ranks than in training. If there are more ranks than
experts, each rank has a slice of an expert. Ranks have tokens of their own, or all the same."""

import torch
from torch import nn

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.comm.group_communicators import native_of
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.errors import fail
from deepspeed.moe.exchange import named
from deepspeed.moe.grouped import _Result, steps_of
from deepspeed.moe.rows import reorder_rows
from deepspeed.utils.tensor_slices import even_cut, narrow


def share_experts(layer, group, ep_size, name):
    """``layer``, a ``MoE`` that has all experts, keeps those of this rank of ``group``, which has ``ep_size`` ranks; or
    one that has those already learns its group."""
    moe = layer.deepspeed_moe
    moe.set_name(name)
    rank = dist.get_rank(group) if ep_size > 1 else 0
    if layer.num_experts % ep_size != 0:
        fail(name, f"its {layer.num_experts} experts cannot be shared evenly by ep_size={ep_size} ranks")
    if layer.ep_size not in (1, ep_size):
        fail(name, f"it was built with ep_size={layer.ep_size}: to serve it so build it with 1 or {ep_size}")
    if layer.ep_size != ep_size:
        local, experts = layer.num_experts // ep_size, moe.experts
        experts.deepspeed_experts = nn.ModuleList(experts.deepspeed_experts[rank * local : (rank + 1) * local])
        experts.num_local_experts = layer.num_local_experts = moe.num_local_experts = local
        layer.ep_size = moe.ep_size = ep_size
        layer.expert_group_name = moe.ep_group_name = f"ep_size_{ep_size}"
    layer._number_experts(rank)
    moe._set_ep_group(group if ep_size > 1 else None)


def serve_alike(layer, group, shared):
    """All ranks of ``group`` bring the same tokens to ``layer``, whose experts ``shared`` of them share, in slices
    where there are more ranks: each works on its experts' rows, and what they make is added up."""
    moe = layer.deepspeed_moe
    slices, rank = dist.get_world_size(group) // shared, dist.get_rank(group)
    if slices > 1:
        cut(moe.experts, rank % slices, slices, moe.layer_name)
    moe.experts = ExpertsOfAlike(moe.experts, rank // slices * moe.num_local_experts, moe.num_local_experts, group)
    moe.ep_group, moe.ep_size, moe.num_local_experts = None, 1, layer.num_experts
    layer.ep_size, layer.num_local_experts = 1, layer.num_experts


def slice_experts(layer, group):
    """Each rank of ``group``, whose ranks have the same experts of ``layer``, keeps a slice of each."""
    moe = layer.deepspeed_moe
    cut(moe.experts, dist.get_rank(group), dist.get_world_size(group), moe.layer_name)
    moe.experts = SlicedExperts(moe.experts, group, moe.layer_name)


def cut(experts, rank, ranks, where):
    """``experts``, ``Experts`` or ``GroupedExperts``, keep slice ``rank`` of ``ranks`` of each: what all slices make
    adds up to what the expert makes."""
    if isinstance(experts, GroupedExperts):
        axes = [(experts, "w1", 1), (experts, "w2", 2), (experts, "w3", 1)]
        return _keep_slices(axes, experts.w2.shape[2], rank, ranks, where)
    for number, expert in enumerate(experts.deepspeed_experts):
        found = _linears(expert, steps_of(expert) or [])
        if found is None:
            fail(
                where,
                f"expert {number} of this rank cannot be sliced for {ranks} ranks: it is not made of linear layers of "
                "the input, functions of single numbers and one linear layer behind them",
            )
        columns, last = found
        axes = [(linear, name, 0) for linear in dict.fromkeys(columns) for name in ("weight", "bias")]
        _keep_slices([*axes, (last, "weight", 1)], last.in_features, rank, ranks, where)
        if last.bias is not None and rank != 0:  # it is added once
            last.bias = nn.Parameter(torch.zeros_like(last.bias), requires_grad=last.bias.requires_grad)
        for linear in (*columns, last):
            linear.out_features, linear.in_features = linear.weight.shape


def _keep_slices(axes, width, rank, ranks, where):
    """``axes``: ``(module, name of a parameter, axis along which it is cut)``; modules need not have all of them."""
    if width % ranks != 0:
        fail(where, f"its experts are {width} wide inside: no {ranks} slices")
    table = even_cut([width], ranks, where)
    for module, name, axis in axes:
        old = getattr(module, name)
        if old is not None:
            kept = narrow(old.detach(), axis, table, rank)
            setattr(module, name, nn.Parameter(kept, requires_grad=old.requires_grad))


def _linears(expert, steps):
    """``(linear layers that are cut along what they make, the last one, cut along what it gets)``; None for an expert
    that is not cut so: linear layers of the input, functions of single numbers, a linear layer whose result is the
    expert's."""
    kinds, columns, last = [], [], None
    for kind, target, args, kwargs in steps:
        given = {kinds[a] for a in (*args, *kwargs.values()) if isinstance(a, _Result)}
        linear = expert.get_submodule(target) if kind == "call_module" else None
        if kind == "placeholder":
            kinds.append("whole")
        elif kind == "output":
            return (columns, last) if given == {"summed"} else None
        elif isinstance(linear, nn.Linear) and given == {"whole"}:
            columns.append(linear)
            kinds.append("cut")
        elif isinstance(linear, nn.Linear) and given == {"cut"}:
            last = linear
            kinds.append("summed")
        elif len(given) == 1 and given <= {"whole", "cut"}:
            kinds.append(*given)
        else:
            return None
    return None


def _run(experts, rows, counts, first):
    """``counts``: those of the experts from ``first`` on."""
    return experts(rows, counts, first) if first else experts(rows, counts)  # stacked ones are run together


class SlicedExperts(nn.Module):
    """``experts`` of which each rank of ``group`` has a slice: rows of all its ranks run through all slices, and what
    the slices make is added up."""

    def __init__(self, experts, group, layer_name):
        super().__init__()
        self.experts, self.group, self.layer_name = experts, group, layer_name
        self.ranks = dist.get_world_size(group)

    def forward(self, inputs, rows=None, first=0):
        """As ``Experts``; all ranks of the group call it."""
        if rows is not None:
            return self._through_slices(inputs, list(rows), first)
        ranks, local, capacity, width = inputs.shape
        flat = inputs.transpose(0, 1).reshape(-1, width)
        made = self._through_slices(flat, [ranks * capacity] * local, 0)
        return made.view(local, ranks, capacity, width).transpose(0, 1)

    @torch.no_grad()
    def _through_slices(self, mine, counts, first):
        theirs = torch.empty(self.ranks * len(counts), dtype=torch.int64)
        with named(self.layer_name):
            dist.all_gather_into_tensor(theirs, torch.tensor(counts, dtype=torch.int64), group=self.group)
            taken, per_expert, order = _native._C.plan_arrivals(theirs.tolist(), self.ranks, len(counts))
            given = [len(mine)] * self.ranks
            ranks = native_of(self.group, mine)
            arrived = _native._C.exchange_rows(ranks, mine.repeat(self.ranks, 1), given, taken)
            ordered, inverse = reorder_rows(arrived, order.to(mine.device))
            made, _ = reorder_rows(_run(self.experts, ordered, per_expert, first), inverse)
            back = _native._C.exchange_rows(ranks, made, taken, given)
        parts = back.view(self.ranks, len(mine), mine.shape[1])
        return parts.to(torch.promote_types(mine.dtype, torch.float32)).sum(0).to(mine.dtype)


class ExpertsOfAlike(nn.Module):
    """All experts of a layer, of which this rank has ``count`` from ``first`` on, or a slice of each: the ranks of
    ``group`` get the same rows and add up what each makes of those of its experts."""

    def __init__(self, experts, first, count, group):
        super().__init__()
        self.experts, self.group, self.first, self.count = experts, group, first, count

    @torch.no_grad()
    def forward(self, inputs, rows=None, first=0):
        """As ``Experts``, with all experts' rows; all ranks of the group call it."""
        if rows is None:  # [1, experts, capacity, width]
            counts, flat = [inputs.shape[2]] * inputs.shape[1], inputs.reshape(-1, inputs.shape[-1])
        else:
            counts, flat = [0] * first + list(rows), inputs
        begin = sum(counts[: self.first])
        mine = counts[self.first : self.first + self.count]
        own = slice(begin, begin + sum(mine))
        made = torch.zeros_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        if sum(mine):
            made[own] = _run(self.experts, flat[own], mine, 0).to(made.dtype)
        dist.all_reduce(made, group=self.group)
        return made.to(flat.dtype).view(inputs.shape)
