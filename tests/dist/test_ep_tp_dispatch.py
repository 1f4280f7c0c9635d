"""``deepspeed.moe.ep_tp_dispatch``: tensor-parallel ranks divide the assignments of their tokens among them."""

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.moe import ep_tp_dispatch as dispatch
from harness import on_ranks
from refusals import refused

WIDTH = 5


def payload_of(tokens=9, k=2, experts=4, seed=0):
    """Random choices, two of which are dropped, in the order of the experts, for two expert-parallel ranks."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).topk(k, 1)[1].reshape(-1)
    order = chosen.sort(stable=True)[1]
    drop = torch.zeros(tokens * k, dtype=torch.bool)
    drop[:2] = True
    to_first = int((chosen < experts // 2).sum())
    return dispatch.RoutedAssignmentPayload(
        token_indices=torch.div(order, k, rounding_mode="floor"),
        expert_indices=chosen[order],
        assignment_indices=order,
        capacity_slots=dispatch.assignment_ordinals_by_expert(chosen[order]),
        combine_weights=torch.rand(tokens * k, generator=generator).requires_grad_(),
        drop_mask=drop,
        pad_mask=torch.zeros(tokens * k, dtype=torch.bool),
        input_splits=[to_first, tokens * k - to_first],
        extra={"number": torch.arange(tokens * k)},
    )


def combined(payload, rows, tokens=9):
    """For each token the sum of its assignments' rows, ``rows`` [experts, width], times their weights."""
    parts = rows[payload.expert_indices] * payload.combine_weights[:, None]
    return torch.zeros(tokens, WIDTH).index_add(0, payload.token_indices, parts)


def test_ordinals():
    chosen = torch.tensor([[2, 0], [2, 2], [0, -1], [5, 0]])
    assert dispatch.assignment_ordinals_by_expert(chosen).tolist() == [[0, 0], [1, 2], [1, -1], [0, 2]]
    assert dispatch.assignment_ordinals_by_expert(torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_assignment_has_one_rank_and_each_expert_is_divided_evenly(size):
    payload = payload_of()
    parts = [dispatch.partition_assignments(payload, tp_group=None, tp_rank=r, tp_size=size) for r in range(size)]
    numbers = torch.cat([local.extra["number"] for local, _ in parts])
    assert numbers.sort()[0].tolist() == payload.extra["number"].tolist()
    for local, context in parts:
        own = local.extra["number"]
        for name, value in payload.tensors().items():
            assert torch.equal(local.tensors()[name], value[own]), name
        assert own.tolist() == sorted(own.tolist()) and sum(local.input_splits) == len(own) and not local.output_splits
        assert local.input_splits[0] == int((local.expert_indices < 2).sum())
        each = [int((local.expert_indices == expert).sum()) for expert in range(4)]
        wanted = [int((payload.expert_indices == expert).sum()) / size for expert in range(4)]
        assert all(abs(count - share) < 1 for count, share in zip(each, wanted))
        found = dispatch.dispatch_counters(context)
        assert found["total_assignments"] == 18 and found["local_assignments"] == len(own)
        assert found["dropped_assignments"] == 2 and found["local_dropped_assignments"] == int(local.drop_mask.sum())
    refused(ValueError, "tp_rank=3 is not a rank of tp_size=3", dispatch.partition_assignments, payload,
            tp_group=None, tp_rank=3, tp_size=3)  # fmt: skip


@on_ranks(3, init=True)
def test_the_sum_is_the_whole_result_and_the_weights_get_their_gradient_once(rank, world):
    group, rows = dist.get_world_group(), torch.sin(torch.arange(4.0 * WIDTH)).view(4, WIDTH).requires_grad_()
    whole = payload_of()
    wanted = combined(whole, rows)
    wanted.square().sum().backward()
    expected, of_rows = whole.combine_weights.grad, rows.grad
    rows.grad, payload = None, payload_of()
    dispatch.assert_tp_payload_consistent(payload, tp_group=group, tp_size=world)
    local, context = dispatch.partition_assignments(payload, tp_group=group, tp_rank=rank, tp_size=world)
    made = dispatch.restore_combined(combined(local, rows), context, tp_group=group, validate_coverage=True)
    torch.testing.assert_close(made, wanted)
    made.square().sum().backward()
    torch.testing.assert_close(payload.combine_weights.grad, expected)  # whole, on each rank
    dist.all_reduce(rows.grad)  # of an expert: each rank has a part
    torch.testing.assert_close(rows.grad, of_rows)


@on_ranks(2, init=True)
def test_ranks_that_route_differently_are_named(rank, world):
    group = dist.get_world_group()
    for name, change in (
        ("expert_indices", lambda one: one.expert_indices.__setitem__(3, 1)),
        ("combine_weights", lambda one: one.combine_weights.data.__setitem__(0, 9.0)),
        (r"extra\['number'\]", lambda one: one.extra.__setitem__("number", torch.zeros(18))),
        ("input_splits", lambda one: one.input_splits.__setitem__(0, 99)),
    ):
        payload = payload_of()
        if rank == 1:
            change(payload)
        refused(RuntimeError, f"{name} of rank 1 .*is not that of rank 0", dispatch.assert_tp_payload_consistent,
                payload, tp_group=group, tp_size=world)  # fmt: skip
    payload = payload_of(seed=rank)
    local, context = dispatch.partition_assignments(payload, tp_group=group, tp_rank=rank, tp_size=world)
    refused(RuntimeError, "by another number than one", dispatch.restore_combined, torch.zeros(9, WIDTH), context,
            tp_group=group, validate_coverage=True)  # fmt: skip
    dispatch.assert_tp_payload_consistent(payload, tp_group=None, tp_size=1)
    alone, context = dispatch.partition_assignments(payload, tp_group=None, tp_rank=0, tp_size=1)
    given = torch.zeros(9, WIDTH)
    assert dispatch.restore_combined(given, context, tp_group=None) is given and len(alone.token_indices) == 18
