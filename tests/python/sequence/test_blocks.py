"""Blocks of attention by the kernels, by torch, and what the kernels refuse."""

import types

import pytest
import torch

from deepspeed._native import _C
from deepspeed.sequence import blockwise
from deepspeed.sequence.blockwise import Dropped, Rows, block_gradients
from deepspeed.sequence.chunked import chunked_attention
from deepspeed.sequence.hf_attention import UlyssesSPAttentionHF

GAPS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def normal(*shape, dtype, seed):
    made = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def plain(query, key, value, causal, mask, cap):
    """Attention as it is written down; a query that sees nothing gets zeros."""
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    scores = torch.matmul(query, key.transpose(-1, -2)) * 0.3
    scores = cap * torch.tanh(scores / cap) if cap else scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = (seen.tril() if causal else seen) & (mask if mask is not None else seen)
    return torch.matmul(scores.masked_fill(~seen, -1e30).softmax(-1) * seen, value)


def worst(found, expected):
    return float((found.double() - expected.double()).abs().max() / expected.abs().max().clamp(min=1.0))


@pytest.fixture
def no_scores(monkeypatch):
    """Torch may not compute scores."""
    monkeypatch.setattr(blockwise, "_scores", lambda *args: pytest.fail("a block of scores was made"))


@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [4, 35])
def test_chunks_equal_plain_attention(chunk, causal, dtype, cap):
    leaves = [normal(2, heads, 35, 5, dtype=dtype, seed=at).requires_grad_() for at, heads in enumerate((4, 2, 2))]
    mask = torch.rand(2, 1, 35, 35, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[1, :, 6] = False
    upper = normal(2, 4, 35, 5, dtype=dtype, seed=9)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for looks in (None, mask):
        expected = plain(*wide, causal, looks, cap)
        wanted = torch.autograd.grad(expected, wide, upper.double())
        may = None if looks is None else lambda queries, keys: mask[:, :, slice(*queries), slice(*keys)]
        found = chunked_attention(*leaves, chunk, causal, 0.3, looks=may, soft_cap=cap)
        assert found.dtype == dtype and worst(found, expected) < GAPS[dtype]
        for grad, one in zip(torch.autograd.grad(found, leaves, upper), wanted):
            assert worst(grad, one) < GAPS[dtype]


def sdpa_attention_forward(*args, **kwargs):
    """By its name the attention that chunks stand in for."""
    raise AssertionError("chunks compute this")


def test_models_with_soft_caps_have_chunks():
    made = UlyssesSPAttentionHF.__new__(UlyssesSPAttentionHF)  # a group is not needed for one rank
    made.attn, made.chunk, made.offload = sdpa_attention_forward, 4, False
    module = types.SimpleNamespace(is_causal=True, training=True)
    query, key, value = (normal(1, heads, 9, 4, dtype=torch.float32, seed=heads) for heads in (4, 2, 2))
    found, _ = made._alone(module, query, key, value, None, scaling=0.3, softcap=0.7)
    assert torch.allclose(found.transpose(1, 2), plain(query, key, value, True, None, 0.7), atol=1e-5)
    assert not torch.allclose(found.transpose(1, 2), plain(query, key, value, True, None, 0.0), atol=1e-3)
    with pytest.raises(ValueError, match="the model passes s_aux to its attention"):
        made._alone(module, query, key, value, None, scaling=0.3, softcap=0.7, s_aux=torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_compute_them(dtype, no_scores):
    query, key = normal(1, 2, 9, 4, dtype=dtype, seed=0), normal(1, 1, 9, 4, dtype=dtype, seed=1)
    rows = Rows(query, 1, 0.5, Dropped(0.0, 3))
    rows.see(key, key, True)
    output, lse = rows.result()
    assert output.shape == query.shape and lse.shape == (1, 2, 9, 1) and lse.dtype == torch.float32
    row_sum = torch.zeros_like(lse)
    found = block_gradients(query, key, key, output, row_sum, lse, 0.5, True)
    assert [one.shape for one in found] == [query.shape, key.shape, key.shape]


def test_torch_computes_what_kernels_do_not(monkeypatch):
    calls, scores = [], blockwise._scores
    monkeypatch.setattr(blockwise, "_scores", lambda *args: calls.append(args) or scores(*args))
    one = torch.ones(1, 1, 3, 2)
    Rows(one.double(), 1, 0.5).see(one.double(), one.double())
    Rows(one, 1, 0.5, Dropped(0.5, 1)).see(one, one)
    assert len(calls) == 2


def test_on_meta_no_scores_are_counted(no_scores):
    """A step that is planned has the memory of one that runs."""
    query = torch.empty(1, 2, 9, 4, device="meta")
    rows = Rows(query, 2, 0.5)
    rows.see(query, query, True)
    output, lse = rows.result()
    found = block_gradients(query, query, query, output, lse, lse, 0.5, True)
    assert all(one.is_meta and one.shape == query.shape for one in (output, *found))


def test_merged_states_are_the_whole():
    query, key, value = (normal(1, 2, n, 4, dtype=torch.float32, seed=n) for n in (7, 12, 13))
    value = value[:, :, :12]
    whole, first, second = (Rows(query, 2, 0.5) for _ in range(3))
    whole.see(key, value)
    first.see(key[:, :, :5], value[:, :, :5])
    second.see(key[:, :, 5:], value[:, :, 5:])
    _C.AttentionOps(1).merge([first.high, first.total, first.sum], [second.high, second.total, second.sum])
    for found, expected in zip(first.result(), whole.result()):
        assert torch.allclose(found, expected, atol=1e-6)


def test_what_is_refused():
    ops, rules, one = _C.AttentionOps(1), _C.BlockRules(1.0), torch.zeros(1, 2, 3, 4)
    state = [torch.zeros(1, 2, 3, size) for size in (1, 1, 4)]
    for key, wrong in ((torch.zeros(1, 2, 3, 5), "do not belong together"), (one.double(), "do not belong together")):
        with pytest.raises(ValueError, match=wrong):
            ops.forward([one, key, key], state, True, rules)
    with pytest.raises(ValueError, match="has 6 numbers of Float here"):
        ops.forward([one] * 3, [state[2], state[1], state[2]], True, rules)
    for looks in (torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 3, dtype=torch.bool)):
        with pytest.raises(ValueError, match="may look among 3 keys is bool"):
            ops.forward([one] * 3, state, True, _C.BlockRules(1.0, looks=looks))
    with pytest.raises(ValueError, match="has not the shape"):
        ops.backward([one, one, one, one[:, :1]], [state[0], state[0]], [one] * 3, rules)
    with pytest.raises(ValueError, match="takes 2 statistics, got 1"):
        ops.backward([one] * 4, [state[0]], [one] * 3, rules)
    with pytest.raises(ValueError, match="states of attention that are merged"):
        ops.merge(state, [state[0], state[1], state[2].double()])
    with pytest.raises(ValueError, match="soft_cap is -1"):
        chunked_attention(one, one, one, 2, soft_cap=-1)
