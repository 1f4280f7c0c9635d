"""Ulysses on ranks that share a sequence: outputs and gradients of one process, whatever the number of heads."""

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.runtime.sequence_parallel.parallel_state_sp import initialize_sequence_parallel
from deepspeed.sequence import exchange
from deepspeed.sequence.autosp_vit import UlyssesSPViTAttention
from deepspeed.sequence.heads import HeadPlan, shares
from deepspeed.sequence.layer import (
    DistributedAttention,
    _rotate_half,
    _SeqAllToAll,
    apply_rotary_pos_emb,
    single_all_to_all,
)
from deepspeed.utils import groups
from harness import on_ranks, run_ranks
from refusals import refused
from sampling import every_case, sample
from sequence_models import attend, of_cases, part, projections, worst

HEADS = [(8, 8), (8, 2), (6, 3), (5, 1), (2, 2), (3, 1), (7, 7), (6, 2)]


def test_heads_are_whole_and_copied_only_where_they_are_read():
    assert shares(5, 3) == [(0, 2), (2, 4), (4, 5)] and shares(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]
    for query, kv in [*HEADS, (12, 4), (64, 8), (1, 1)]:
        for ranks in (1, 2, 3, 4, 5, 8):
            plan = HeadPlan(query, kv, ranks)
            assert [head for run in plan.query_ranges for head in range(*run)] == list(range(query))
            assert max(b - a for a, b in plan.query_ranges) - min(b - a for a, b in plan.query_ranges) <= 1
            for rank, (start, stop) in enumerate(plan.query_ranges):
                first, end = plan.kv_ranges[rank]
                read = [head // (query // kv) for head in range(start, stop)]
                assert sorted(set(read)) == list(range(first, end))
                assert [first + head for head in plan.kv_of_queries(rank)] == read
                if plan.repeats(rank):
                    assert read == [head for head in range(first, end) for _ in range(plan.repeats(rank))]
    refused(ValueError, "6 query heads and 4 key/value heads", HeadPlan, 6, 4, 2)


def attention_case(rank, world, heads, kv, causal, batch_dim, joined, stream):
    whole = [x.requires_grad_() for x in projections(heads, kv, batch_dim=batch_dim)]
    mask = "causal" if causal else None
    expected = attend(*whole, mask, batch_dim)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (expected * weights).sum().backward()
    along = 1 - batch_dim
    mine = [part(x, rank, world, along) for x in whole]

    def local(query, key, value, mask=None):
        assert query.shape[along] == 12  # of all ranks
        out = attend(query, key, value, mask, batch_dim)
        return out.reshape(*out.shape[:2], -1) if joined else out

    made = DistributedAttention(local, dist.get_world_group(), sp_stream=object() if stream else None)
    out = made(*mine, batch_dim, None, mask)
    scale = part(weights, rank, world, along).detach()
    found = out.reshape(scale.shape)
    (found * scale).sum().backward()
    pairs = [(found, part(expected, rank, world, along))]
    pairs += [(x.grad, part(y.grad, rank, world, along)) for x, y in zip(mine, whole)]
    return worst(pairs)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_one_process(world):
    cases = [
        (*heads, causal, batch_dim, joined, stream)
        for heads in HEADS
        for causal in (True, False)
        for batch_dim in (0, 1)
        for joined in (False, True)
        for stream in (False, True)
    ]
    cases = cases if every_case() else [cases[index] for index in sample(cases)]
    assert max(map(max, run_ranks(world, of_cases, attention_case, cases, init=True, timeout=120))) < 1e-12


@on_ranks(2, init=True)
def test_attention_mask_as_fourth_argument(rank, world):
    """The tutorial's: everything after the values goes to the attention; the sequence is first."""
    whole = projections(4, 4, batch_dim=1)
    mask = torch.full((12, 12), float("-inf"), dtype=torch.float64).triu(1)
    made = DistributedAttention(lambda q, k, v, m, more=None: attend(q, k, v, m, 1), dist.get_world_group())
    mine = [part(x, rank, world, 0) for x in whole]
    expected = part(attend(*whole, mask, 1), rank, world, 0)
    batch_first = DistributedAttention(lambda q, k, v, m: attend(q, k, v, m, 0), dist.get_world_group(), gather_idx=1)
    turned = [part(x.transpose(0, 1).contiguous(), rank, world, 1) for x in whole]
    none = DistributedAttention(lambda q, k, v, m: attend(q, k, v, m, 1), dist.get_world_group())
    pairs = [
        (made(*mine, mask), expected),
        (made(*mine, mask, "more"), expected),
        (batch_first(*turned, mask).transpose(0, 1), expected),
        (none(*mine, None), part(attend(*whole, None, 1), rank, world, 0)),
    ]
    assert worst(pairs) < 1e-12


@on_ranks(2, init=True)
def test_rotary_is_of_the_whole_sequence(rank, world):
    whole = projections(4, 2)
    angles = torch.arange(12.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    angles = torch.cat((angles, angles), -1)[:, None, None, :]  # [sequence, 1, 1, size], as Megatron makes them
    cos, sin = angles.cos(), angles.sin()
    turned = [apply_rotary_pos_emb(x, cos.transpose(0, 1), sin.transpose(0, 1)) for x in whole[:2]]
    made = DistributedAttention(lambda q, k, v: attend(q, k, v, "causal"), dist.get_world_group())
    out = made(*(part(x, rank, world, 1) for x in whole), 0, (cos, sin))
    assert worst([(out, part(attend(*turned, whole[2], "causal"), rank, world, 1))]) < 1e-12


def test_rotation():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert _rotate_half(x).tolist() == [-3.0, -4.0, 1.0, 2.0]
    cos, sin = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    assert apply_rotary_pos_emb(x, cos, sin).tolist() == [-2.0, 1.0, 3.0, 4.0]


@on_ranks(4, init=True)
def test_one_tensor_there_and_back(rank, world):
    initialize_sequence_parallel(2)
    group = groups._get_sequence_parallel_group()
    place = dist.get_rank(group)
    for heads, batch_dim in [(4, 0), (5, 0), (4, 1), (4, 0)]:  # the last one asks for what an uneven cut has left
        x = torch.randn(2, 4, heads, 3, requires_grad=True)
        there = _SeqAllToAll.apply(group, x, 2, 0, batch_dim)
        count = shares(heads, 2)[place]
        assert there.shape == ((2, 8) if batch_dim == 0 else (4, 4)) + (count[1] - count[0], 3)
        back = _SeqAllToAll.apply(group, there, 0, 2, batch_dim)
        assert torch.equal(back, x)
        back.square().sum().backward()
        assert torch.equal(x.grad, 2 * x)
    handle = {}
    later = single_all_to_all(x.detach(), 2, 0, 0, group, True, handle, "dq")
    handle["dq_work"].wait()
    assert torch.equal(later, there)


def attended(*heads, length=12, batch_dim=0, change=lambda query, key, value: (query, key, value)):
    layer = DistributedAttention(attend, dist.get_world_group())
    return layer(*change(*projections(*heads, length=length)), batch_dim)


# what -> words of the error, and the call
BAD = {
    "lengths": (r"different lengths \(rank 0: 4, rank 1: 5\)", lambda rank: attended(4, 4, length=4 + rank)),
    "heads": ("6 query heads and 4 key/value heads", lambda rank: attended(6, 4)),
    "shapes": (
        "do not belong to one sequence",
        lambda rank: attended(4, 4, change=lambda query, key, value: (query, key, key[:, :4])),
    ),
    "dtypes": (
        "float64, torch.float32 and torch.float64: make them one dtype",
        lambda rank: attended(4, 4, change=lambda query, key, value: (query, key.float(), value)),
    ),
    "cut": (
        "5 tokens cannot be cut into 2 equal parts",
        lambda rank: single_all_to_all(torch.zeros(2, 5, 4, 3), 1, 2, 0, dist.get_world_group()),
    ),
    "rank of tensor": (
        "got a tensor of shape", lambda rank: single_all_to_all(torch.zeros(2, 5), 1, 2, 0, dist.get_world_group()),
    ),
    "batch dim": ("batch_dim_idx is 2", lambda rank: attended(4, 4, batch_dim=2)),
}  # fmt: skip


@on_ranks(2, init=True, timeout=60)
def test_bad_input_is_an_error_on_every_rank(rank, world):
    for words, call in BAD.values():
        refused(ValueError, words, call, rank)


@pytest.mark.parametrize("env", [{"DS_SHM_COLLECTIVES": "1"}, {"DS_SHM_COLLECTIVES": "0"}])
@on_ranks(2, init=True, timeout=60, given=["env"])
def test_lengths_that_differ_later_are_an_error_on_every_rank(rank, world):
    """One rank has met its length before, the other has not; and both have."""
    group = dist.get_world_group()
    attention = DistributedAttention(attend, group)
    tower = UlyssesSPViTAttention(torch.nn.Identity(), group)
    made = (
        lambda length: attention(*projections(4, 2, length=length), 0),
        lambda length: tower(torch.ones(1, length, 2)),
    )
    for call in made:
        for first in (4, 6):
            call(first)
            refused(ValueError, r"different lengths \(rank 0: 4, rank 1: 6\)", call, (4, 6)[rank])


# ---- traffic ---------------------------------------------------------------------------------------------------------
def body_traffic(rank, world, heads, kv, length):
    """Elements that this rank hands to exchanges in a forward, those for itself included."""
    group, parts = dist.get_world_group(), [part(x, rank, world, 1) for x in projections(heads, kv, length=length)]
    calls, elements = exchange.handed_over(group, parts[0])
    DistributedAttention(attend, group)(*parts, 0)
    after, sent = exchange.handed_over(group, parts[0])
    assert after - calls == 2  # queries, keys and values together; the result
    return sent - elements


def test_traffic_does_not_grow_with_length_and_ranks_together():
    """The elements that N tokens with h features send on P ranks: 4 N h / P; with fewer key/value heads less, unless
    they are copied."""
    found = {world: run_ranks(world, body_traffic, 4, 4, 8 * world, init=True) for world in (2, 4)}
    assert found == {world: [4 * 8 * 4 * 4 * 2] * world for world in (2, 4)}
    assert run_ranks(2, body_traffic, 4, 2, 16, init=True) == [(2 * 4 + 2 * 2) * 8 * 4 * 2] * 2
    assert max(run_ranks(4, body_traffic, 4, 1, 32, init=True)) == (2 * 4 + 2 * 4) * 8 * 4 * 2
