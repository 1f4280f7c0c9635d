"""Divides the work of experts among the ranks that cut the layers beside them; a published import path.

The ranks of one tensor-parallel group have the same tokens, and so the same *assignments*: choices of an expert by a
token. Each rank takes every ``tp_size``-th assignment of each expert (``partition_assignments``), lets the experts of
its expert-parallel group work on them, and combines their rows. The sum over the group is the whole result
(``restore_combined``). Source: Liu et al., "MoE Parallel Folding" (2025).
"""

import dataclasses

import torch

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.comm import mesh_views
from deepspeed.utils.rank_differences import first_difference


@dataclasses.dataclass
class RoutedAssignmentPayload:
    """Assignments, one an entry of each tensor, all of them of shape [assignments].

    ``token_indices``, ``expert_indices``: int, who chose whom. ``assignment_indices``: int, token * k + choice.
    ``capacity_slots``: int, the number of the row among those of its expert. ``combine_weights``: float, what the
    expert's row is multiplied by. ``drop_mask``, ``pad_mask``: bool, assignments that no expert works on, and entries
    that stand for no assignment. ``input_splits``: how many entries, in their order, go to each rank of the
    expert-parallel group; ``output_splits``: how many come from each, empty where that is not known yet. ``extra``:
    more tensors with an entry for each assignment.
    """

    token_indices: torch.Tensor
    expert_indices: torch.Tensor
    assignment_indices: torch.Tensor
    capacity_slots: torch.Tensor
    combine_weights: torch.Tensor
    drop_mask: torch.Tensor
    pad_mask: torch.Tensor
    input_splits: list[int] = dataclasses.field(default_factory=list)
    output_splits: list[int] = dataclasses.field(default_factory=list)
    extra: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def tensors(self):
        """``{name: tensor}``, those of ``extra`` under the name ``extra['<name>']``."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return {**own, **{f"extra[{name!r}]": value for name, value in self.extra.items()}}


@dataclasses.dataclass
class PartitionContext:
    """A partition of ``payload``, which the ranks of the group have alike: ``own`` are the places in it of the
    assignments that rank ``tp_rank`` of ``tp_size`` has."""

    tp_rank: int
    tp_size: int
    payload: RoutedAssignmentPayload
    own: torch.Tensor


def payload_of_choices(experts, weights, capacity_slots):
    """The payload of tokens that keep all their choices. The arguments have the shape [tokens, k]."""
    tokens, k = experts.shape
    numbers = torch.arange(tokens * k, device=experts.device)
    none = torch.zeros(tokens * k, dtype=torch.bool, device=experts.device)
    return RoutedAssignmentPayload(
        token_indices=torch.div(numbers, k, rounding_mode="floor"),
        expert_indices=experts.reshape(-1),
        assignment_indices=numbers,
        capacity_slots=capacity_slots.reshape(-1),
        combine_weights=weights.reshape(-1),
        drop_mask=none,
        pad_mask=none,
    )


def assert_tp_payload_consistent(payload, *, tp_group, tp_size):
    """Raises RuntimeError on every rank of ``tp_group`` where its ranks have routed differently, with the rank and the
    field that differs. Every rank calls it; with ``tp_size`` 1 it does nothing."""
    if tp_size <= 1:
        return
    splits = {name: torch.tensor(getattr(payload, name)) for name in ("input_splits", "output_splits")}
    found = first_difference({**payload.tensors(), **splits}.items(), tp_group)
    if found is not None:
        name, rank, shape, first, wanted = found
        raise RuntimeError(
            f"routing differs within the TP group: {name} of rank {rank} (shape {shape}) is not that of rank {first} "
            f"(shape {wanted}). The {tp_size} ranks that cut a layer need the same tokens and the same router: check "
            "that they get the same batch, and draw the same random numbers before the router"
        )


def assignment_ordinals_by_expert(expert_indices):
    """For each entry of ``expert_indices``, int of any shape, how many earlier ones name the same expert: int64 of that
    shape; -1 for entries below 0, which name none."""
    flat = expert_indices.reshape(-1, 1).to(torch.int32)
    experts = int(flat.max()) + 1 if flat.numel() else 1
    plan = _C.RoutePlan(flat.clamp(min=-1), max(experts, 1), -1, False, None)
    return plan.location().to(torch.int64).view(expert_indices.shape)


def partition_assignments(payload, *, tp_group, tp_rank, tp_size):
    """``(payload, context)`` of this rank's assignments: those whose ordinal among the assignments of their expert is
    ``tp_rank`` modulo ``tp_size``. All ranks of ``tp_group`` call it with equal payloads. In backward the gradient of
    ``combine_weights`` is the sum over the group, so the router sees all of it on each rank; with ``tp_group`` None it
    stays this rank's part. ValueError for a rank that is not below the size."""
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"partition_assignments: tp_rank={tp_rank} is not a rank of tp_size={tp_size}")
    own = _places_of(payload.expert_indices, tp_rank, tp_size)
    whole = {"combine_weights": payload.combine_weights}
    if tp_size > 1 and tp_group is not None:
        whole["combine_weights"] = shared_by_ranks(payload.combine_weights, tp_group)
    fields = {name: whole.get(name, value)[own] for name, value in vars(payload).items() if torch.is_tensor(value)}
    ends = torch.tensor(payload.input_splits).cumsum(0).tolist()
    counts = [int(((own >= end - size) & (own < end)).sum()) for end, size in zip(ends, payload.input_splits)]
    extra = {name: value[own] for name, value in payload.extra.items()}
    local = RoutedAssignmentPayload(**fields, input_splits=counts, extra=extra)
    return local, PartitionContext(tp_rank, tp_size, payload, own)


def _places_of(expert_indices, tp_rank, tp_size):
    """The places of a rank's assignments, int64."""
    if expert_indices.is_meta:  # a step that is planned
        return torch.arange(tp_rank, expert_indices.numel(), tp_size, device="meta")
    ordinals = assignment_ordinals_by_expert(expert_indices).clamp(min=0)
    return (ordinals % tp_size == tp_rank).nonzero().flatten()


def shared_by_ranks(tensor, tp_group):
    """``tensor``, which the ranks of ``tp_group`` have alike and use for different assignments: its gradient is the
    sum over the group."""
    return _C.share_over_ranks(mesh_views.tensor_ranks(tp_group), tensor)


def choices_of(payload, shape, num_experts):
    """``(native RoutePlan, weights [tokens, k])`` of a part of the choices of tokens; ``shape``: (tokens, k). Choices
    that are not in the payload have no expert and the weight 0."""
    places = payload.assignment_indices
    experts = torch.full(shape, -1, dtype=torch.int32, device=places.device)
    experts.view(-1)[places] = payload.expert_indices.to(torch.int32)
    weights = payload.combine_weights.new_zeros(experts.numel()).index_copy(0, places, payload.combine_weights)
    # In a step that is planned a plan takes all experts to be chosen as often, by all choices.
    kept = -(-places.numel() // num_experts) if places.is_meta else -1
    return _C.RoutePlan(experts, num_experts, kept, False, None), weights.view(shape)


def restore_combined(local_combined, ctx, *, tp_group, validate_coverage=False):
    """The sum over ``tp_group`` of ``local_combined``, what each rank has combined of its own assignments for all
    tokens, of any shape [tokens, ...]. Its gradient is that of each part. ``validate_coverage``: RuntimeError where an
    assignment had no rank, or several."""
    if ctx.tp_size <= 1:
        return local_combined
    if validate_coverage:
        _check_coverage(ctx, tp_group)
    return _C.reduce_over_ranks(mesh_views.tensor_ranks(tp_group), local_combined)


def _check_coverage(ctx, tp_group):
    total = ctx.payload.expert_indices.numel()
    ranks = torch.zeros(total, dtype=torch.int32, device=ctx.own.device)
    ranks[ctx.own] = 1
    dist.all_reduce(ranks, group=tp_group)
    wrong = (ranks != 1).nonzero().flatten().tolist()
    if wrong:
        raise RuntimeError(
            f"assignment {wrong[0]} of {total} is worked on by {int(ranks[wrong[0]])} of {ctx.tp_size} "
            f"tensor-parallel ranks, and {len(wrong)} assignments by another number than one: the ranks have not "
            "partitioned the same payload"
        )


def dispatch_counters(ctx):
    """Numbers of assignments, and of those that this rank has: a dict of integers."""
    drop, pad = ctx.payload.drop_mask, ctx.payload.pad_mask
    return {
        "tp_rank": ctx.tp_rank,
        "tp_size": ctx.tp_size,
        "total_assignments": drop.numel(),
        "local_assignments": ctx.own.numel(),
        "dropped_assignments": int(drop.sum()),
        "padded_assignments": int(pad.sum()),
        "local_dropped_assignments": int(drop[ctx.own].sum()),
        "local_padded_assignments": int(pad[ctx.own].sum()),
    }
