"""FPDT on ranks that share a sequence, chunk by chunk: outputs and gradients of one process that has it whole."""

import types

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.attention.blocks import Dropped, Rows, ScoreRules, block_gradients
from deepspeed.sequence.fpdt_layer import (
    FPDT_FFN,
    FPDT_Attention,
    FPDT_InputConstruct,
    FPDT_LogitsLoss,
    _FPDTGPUOffloadingAttentionImpl_,
)
from deepspeed.sequence.layer import apply_rotary_pos_emb
from harness import on_ranks, run_ranks
from refusals import refused
from sampling import every_case, sample
from sequence_models import attend, of_cases, worst

SIZE, BATCH = 4, 2


def cut(tensor, chunk, world, rank):
    """``[sequence, batch, ...]`` as rank ``rank`` has it."""
    arguments = types.SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=chunk)
    turned = tensor.transpose(0, 1)
    return FPDT_InputConstruct(turned, None, None, None, None, arguments, world, rank).generate()[0].transpose(0, 1)


def normal(*shape, seed=0):
    drawn = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn.to(get_accelerator().current_device_name())


# ---- who has which tokens --------------------------------------------------------------------------------------------
def test_every_token_is_somewhere_and_chunks_are_shared():
    for length, chunk, world in [(16, 8, 2), (16, 16, 4), (24, 8, 4), (20, 8, 4), (12, 4, 1), (6, 64, 2)]:
        arguments = types.SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=chunk)
        tokens = torch.arange(length)[None].expand(3, length)
        whole = []
        for rank in range(world):
            made = FPDT_InputConstruct(tokens, tokens + 1, None, "mask", tokens + 2, arguments, world, rank)
            mine, labels, loss_mask, mask, places = made.generate()
            assert loss_mask is None and mask == "mask" and mine.shape == (3, length // world)
            assert torch.equal(labels, mine + 1) and torch.equal(places, mine + 2)
            whole.append(mine[0])
        for start in range(0, length, chunk):
            of_chunk = [part[start // world : start // world + chunk // world] for part in whole]
            assert torch.cat(of_chunk).tolist() == list(range(start, min(start + chunk, length)))
    for length, chunk, world in [(9, 4, 2), (8, 3, 2), (8, 1, 2)]:
        arguments = types.SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=chunk)
        refused(
            ValueError,
            "both must be multiples of the ranks",
            FPDT_InputConstruct,
            torch.zeros(1, length),
            None,
            None,
            None,
            None,
            arguments,
            world,
            0,
        )


# ---- blocks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_blocks_are_the_whole(dropout):
    query, key, value = normal(2, 4, 9, 3), normal(2, 2, 9, 3, seed=1), normal(2, 2, 9, 3, seed=2)
    leaves = [one.clone().requires_grad_() for one in (query, key, value)]
    cuts, rules = [(0, 4), (4, 7), (7, 9)], ScoreRules(0.5, dropped=Dropped(dropout, 5) if dropout else None)
    masks = torch.ones(2, 2, 2, 9, 9, dtype=torch.float64)
    masks = rules.mask(masks, (0, 0)) if dropout else masks
    scores = torch.matmul(leaves[0], leaves[1].repeat_interleave(2, 1).transpose(-1, -2)) * 0.5
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    expected = torch.matmul(scores * masks.flatten(1, 2), leaves[2].repeat_interleave(2, 1))
    upper = normal(*expected.shape, seed=3)
    expected.backward(upper)
    parts, grads = [], [torch.zeros_like(one) for one in (query, key, value)]
    for i, (a, b) in enumerate(cuts):
        rows = Rows(query[:, :, a:b], 2, rules)
        for j, (c, d) in enumerate(cuts[: i + 1]):
            rows.see(key[:, :, c:d], value[:, :, c:d], i == j, (a, c))
        output, lse = rows.result()
        parts.append(output)
        row_sum = (output * upper[:, :, a:b]).sum(-1, keepdim=True)
        for j, (c, d) in enumerate(cuts[: i + 1]):
            found = block_gradients(
                query[:, :, a:b], key[:, :, c:d], value[:, :, c:d], upper[:, :, a:b], row_sum, lse, rules, i == j,
                (a, c),
            )  # fmt: skip
            for total, one, (e, f) in zip(grads, found, [(a, b), (c, d), (c, d)]):
                total[:, :, e:f] += one
    pairs = [(torch.cat(parts, 2), expected), *((one, leaf.grad) for one, leaf in zip(grads, leaves))]
    assert worst(pairs) < 1e-12


# ---- attention -------------------------------------------------------------------------------------------------------
def reference(x, weight, bias, heads, kv, rotary, dropout=0.0):
    joined = torch.nn.functional.linear(x, weight, bias)
    widths = [heads * SIZE, kv * SIZE, kv * SIZE]
    query, key, value = (one.unflatten(-1, (-1, SIZE)) for one in joined.split(widths, -1))
    if rotary is not None:
        query, key = apply_rotary_pos_emb(query, *rotary), apply_rotary_pos_emb(key, *rotary)
    return attend(query, key, value, "causal", 1, dropped=Dropped.drawn(dropout))


def attention_case(rank, world, heads, kv, length, chunk, rotary, with_bias, offload, dropout=0.0):
    hidden, width = 6, (heads + 2 * kv) * SIZE
    x, weight = normal(length, BATCH, hidden), normal(width, hidden, seed=1)
    bias = normal(width, seed=2) if with_bias else None
    angles = normal(length, 1, 1, 2, seed=3) if rotary else None
    tables = None if angles is None else (torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin())
    leaves = [None if one is None else one.clone().requires_grad_() for one in (x, weight, bias)]
    torch.manual_seed(6)
    expected = reference(*leaves, heads, kv, tables, dropout)
    upper = normal(*expected.shape, seed=4)
    expected.backward(upper)
    torch.manual_seed(6)
    mine = [None if one is None else one.clone().requires_grad_() for one in (cut(x, chunk, world, rank), weight, bias)]
    chunks = -(-(length // world) // (chunk // world))
    found = _FPDTGPUOffloadingAttentionImpl_.apply(
        mine[0], None, None, tables, dist.get_world_group(), 2, 0, hidden, heads * SIZE, SIZE, kv * SIZE, mine[1],
        mine[2], dropout, chunks, offload,
    )  # fmt: skip
    found.backward(cut(upper, chunk, world, rank).transpose(0, 1))
    for one in mine[1:]:
        if one is not None:
            dist.all_reduce(one.grad)
    pairs = [
        (found.transpose(0, 1), cut(expected, chunk, world, rank)),
        (mine[0].grad, cut(leaves[0].grad, chunk, world, rank)),
        (mine[1].grad, leaves[1].grad),
    ]
    if with_bias:
        pairs.append((mine[2].grad, leaves[2].grad))
    return worst(pairs)


@pytest.mark.any_device
@pytest.mark.parametrize("world", [1, 2, 4])
def test_attention(world):
    cases = [
        (*heads, *lengths, rotary, with_bias, offload)
        for heads in [(4, 4), (4, 2), (6, 3), (5, 1), (2, 2)]
        for lengths in [(16, 8), (16, 16), (24, 8), (20, 8)]
        for rotary in (False, True)
        for with_bias in (False, True)
        for offload in (False, True)
    ]
    cases = cases if every_case() else [cases[index] for index in sample(cases)]
    cases += [(*heads, 20, 8, True, False, False, 0.3) for heads in [(4, 2), (5, 1), (2, 2)]]  # what one process drops
    assert max(map(max, run_ranks(world, of_cases, attention_case, cases, init=True, timeout=120))) < 1e-11


def config_of(heads, kv):
    return types.SimpleNamespace(
        num_attention_heads=heads, num_key_value_heads=kv, kv_channels=SIZE, hidden_size=6, attention_dropout=0.0
    )


@pytest.mark.parametrize("return_bias", [True, False])
@on_ranks(2, init=True)
def test_layer(rank, world, return_bias):
    x, first = normal(16, BATCH, 6), [normal((4 + 2 * 2) * SIZE, 6, seed=1), normal(8 * SIZE, seed=2)]
    second = [normal(6, 4 * SIZE, seed=3), normal(6, seed=4)]
    expected = torch.nn.functional.linear(reference(x, *first, 4, 2, None).flatten(2), *second)
    made = FPDT_Attention(
        config_of(4, 2), *first, *second, dist.get_world_group(), return_bias=return_bias, chunk_size=8
    )
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
    found = made(cut(x, 8, world, rank), mask, None, None)
    if return_bias:
        assert found[1] is second[1]
        found = found[0] + found[1]
    refused(ValueError, "FPDT computes causal attention", made, cut(x, 8, world, rank), ~mask, None, None)
    refused(ValueError, "inference_params must be None", made, cut(x, 8, world, rank), None, {}, None)
    assert worst([(found, cut(expected, 8, world, rank))]) < 1e-11


# ---- the rest of a layer ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", [2, 3, 100])
@pytest.mark.parametrize("add_bias", [True, False])
def test_feed_forward(add_bias, chunk):
    def made():
        shapes = [(7, 2, 4), (8, 4), (8,), (4, 8), (4,)]
        return [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]

    one, other = made(), made()
    out, bias = FPDT_FFN.apply(*one, add_bias, chunk)
    assert (bias is None) == add_bias
    x, w1, b1, w2, b2 = other
    inner = torch.nn.functional.gelu(torch.nn.functional.linear(x, w1, b1), approximate="tanh")
    expected = torch.nn.functional.linear(inner, w2, b2)
    found = out if add_bias else out + bias
    for result in (found, expected):
        (result * normal(7, 2, 4, seed=9)).sum().backward()
    assert worst([(found, expected), *((a.grad, b.grad) for a, b in zip(one, other))]) < 1e-12


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks(init=True)
def test_loss(rank, world):
    hidden, weight = normal(12, BATCH, 4).requires_grad_(), normal(9, 4, seed=1).requires_grad_()
    labels = torch.randint(0, 9, (BATCH, 12), generator=torch.Generator().manual_seed(2))
    expected = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(hidden, weight).permute(1, 2, 0), labels, reduction="none"
    ).t()
    upper = normal(12, BATCH, seed=3)
    expected.backward(upper)
    mine, own = hidden.detach().chunk(world)[rank].clone().requires_grad_(), weight.detach().clone().requires_grad_()
    group = dist.get_world_group()
    found = FPDT_LogitsLoss.apply(mine, labels.chunk(world, 1)[rank], own, rank, world, group, 5)
    found.backward(upper)
    dist.all_reduce(own.grad)
    if world > 1:
        refused(ValueError, "they must be", FPDT_LogitsLoss.apply, mine, labels, own, rank, world, group, 5)
    assert worst([(found, expected), (mine.grad, hidden.grad.chunk(world)[rank]), (own.grad, weight.grad)]) < 1e-12
