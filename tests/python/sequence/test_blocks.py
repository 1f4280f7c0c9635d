"""Blocks of attention by the kernels, by torch, and what the kernels refuse."""

import functools
import types
from unittest import mock

import pytest
import torch

from deepspeed._native import _C
from deepspeed.ops.attention import blocks
from deepspeed.ops.attention.blocks import Dropped, Rows, ScoreRules, block_gradients, philox
from deepspeed.sequence import masks
from deepspeed.sequence.chunked import chunked_attention
from deepspeed.sequence.hf_attention import UlyssesSPAttentionHF
from refusals import refused

HALF = ScoreRules(0.5)
GAPS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def normal(*shape, dtype, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(query, key, value, causal, mask, cap, sinks=None, dropped=None):
    """Attention as it is written down; a query that sees nothing gets zeros."""
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    scores = torch.matmul(query, key.transpose(-1, -2)) * 0.3
    scores = cap * torch.tanh(scores / cap) if cap else scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = (seen.tril() if causal else seen) & (mask if mask is not None else seen)
    scores = scores.masked_fill(~seen, -1e30)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    used = scores.softmax(-1)[..., : seen.shape[-1]] * seen
    used = used if dropped is None else used * dropped.mask(used[:, :, None], (0, 0))[:, :, 0]
    return torch.matmul(used, value)


def assert_near(found, expected, dtype):
    for one, other in zip(found, expected, strict=True):
        gap = float((one.double() - other.double()).abs().max() / other.abs().max().clamp(min=1.0))
        assert one.dtype == dtype and gap < GAPS[dtype], gap


def given(dtype):
    """Queries, keys and values, where they look, and the gradient from above. One query sees nothing."""
    leaves = [normal(2, heads, 35, 5, dtype=dtype, seed=at).requires_grad_() for at, heads in enumerate((4, 2, 2))]
    mask = torch.rand(2, 1, 35, 35, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[1, :, 6] = False
    return leaves, mask, normal(2, 4, 35, 5, dtype=dtype, seed=9)


@pytest.fixture
def no_scores(monkeypatch):
    """Torch may not compute scores."""
    monkeypatch.setattr(blocks, "_scores", lambda *args: pytest.fail("a block of scores was made"))


@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [4, 35])
def test_chunks_equal_plain_attention(chunk, causal, dtype, cap):
    leaves, mask, upper = given(dtype)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for looks in (None, mask):
        expected = plain(*wide, causal, looks, cap)
        wanted = torch.autograd.grad(expected, wide, upper.double())
        may = None if looks is None else lambda queries, keys: mask[:, :, slice(*queries), slice(*keys)]
        found = chunked_attention(*leaves, chunk, causal, 0.3, looks=may, soft_cap=cap)
        assert_near([found, *torch.autograd.grad(found, leaves, upper)], [expected, *wanted], dtype)


@pytest.mark.parametrize("dtype", GAPS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("drop, cap, chunk", [(0.0, 0.0, 4), (0.3, 0.0, 9), (0.5, 0.7, 35), (0.2, 0.7, 6)])
def test_chunks_with_sinks_and_dropout(drop, cap, chunk, causal, dtype):
    leaves, mask, upper = given(dtype)
    leaves.append(normal(4, dtype=dtype, seed=7).requires_grad_())
    dropped = Dropped(drop, 2**61 + 5, 3) if drop else None
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = plain(*wide[:3], causal, mask, cap, wide[3], dropped)
    wanted = torch.autograd.grad(expected, wide, upper.double())
    rules = {"soft_cap": cap, "sinks": leaves[3], "dropped": dropped}
    looks = lambda queries, keys: mask[:, :, slice(*queries), slice(*keys)]  # noqa: E731
    found = chunked_attention(*leaves[:3], chunk, causal, 0.3, looks=looks, **rules)
    assert_near([found, *torch.autograd.grad(found, leaves, upper)], [expected, *wanted], dtype)


def test_sinks_stay_as_they_are():
    """Blocks of one row, too, whose state has as many numbers."""
    query, sinks = normal(1, 2, 9, 4, dtype=torch.float32, seed=0), torch.tensor([0.5, -2.0])
    before = chunked_attention(query, query, query, 9, sinks=sinks)
    found = chunked_attention(query, query, query, 1, sinks=sinks)
    assert sinks.tolist() == [0.5, -2.0] and torch.allclose(found, before, atol=1e-6)


def test_philox_gives_the_published_bits():
    """Random123's kat_vectors."""
    for counter, seed, wanted in [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]:
        assert [int(word) for word in philox([torch.tensor(word) for word in counter], seed)] == wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_mask_of_dropout_does_not_know_the_cut(dtype):
    """Values that are a unit matrix show it, bit for bit."""
    tokens, dropped = 37, Dropped(0.4, 123456789012345, 5)
    query, value = torch.zeros(2, 4, tokens, 3, dtype=dtype), torch.eye(tokens, dtype=dtype).expand(2, 2, -1, -1)
    whole = dropped.mask(torch.ones(2, 2, 2, tokens, tokens, dtype=dtype), (0, 0))
    found = torch.empty(2, 4, tokens, tokens, dtype=dtype)
    for first, last in ((0, 11), (11, 30), (30, 37)):
        rows = Rows(query[:, :, first:last], 2, ScoreRules(1.0, dropped=dropped))
        for start, stop in ((0, 3), (3, 22), (22, 37)):
            rows.see(query[:, :2, start:stop], value[:, :, start:stop], position=(first, start))
        found[:, :, first:last] = rows.result()[0]
    assert torch.equal(found != 0, whole.flatten(1, 2) != 0) and torch.allclose(found * tokens, whole.flatten(1, 2))
    assert 0.37 < float((found == 0).double().mean()) < 0.43
    assert torch.equal(dropped.of_heads(1).mask(whole, (0, 0)).flatten(1, 2)[:, :-1], whole.flatten(1, 2)[:, 1:])


def test_the_state_of_torch_says_what_is_dropped():
    before = torch.get_rng_state()
    assert Dropped.drawn(0.0) is None and torch.equal(before, torch.get_rng_state())
    seeds = set()
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        seeds.add((Dropped.drawn(0.1).seed, Dropped.drawn(0.1).seed))
    assert len(seeds) == 2 and all(first != second for first, second in seeds)
    for wrong in (1.0, -0.1, float("nan")):
        refused(ValueError, "0 or more, and less than 1", Dropped, wrong, 0)
        refused(ValueError, "0 or more and less than 1", _C.BlockDropout, wrong, 0)
    refused(
        ValueError, "numbers of 32 bits where some are dropped, not 4294967296", _C.BlockDropout, 0.1, 0, key=1 << 32
    )


def sdpa_attention_forward(*args, **kwargs):
    """By its name the attention that chunks stand in for."""
    raise AssertionError("chunks compute this")


def flash_attention_forward(*args, **kwargs):
    """By its name an attention that takes padding and windows, not masks."""
    raise AssertionError("chunks compute this")


def alone(attention, chunk=4):
    made = UlyssesSPAttentionHF.__new__(UlyssesSPAttentionHF)  # a group is not needed for one rank
    torch.nn.Module.__init__(made)
    made.attn, made.chunk, made.offload, made.process_group = attention, chunk, False, None
    made._whole = made._first = made._positions = None
    return made


def test_models_with_caps_sinks_and_dropout_have_chunks():
    module, attend = types.SimpleNamespace(is_causal=True, training=True), alone(sdpa_attention_forward)._alone
    parts = [normal(1, heads, 9, 4, dtype=torch.float32, seed=heads) for heads in (4, 2, 2)]
    sinks, rules = torch.tensor([0.3, -1.0, 0.0, 2.0]), {"scaling": 0.3, "softcap": 0.7, "dropout": 0.5}
    torch.manual_seed(5)
    found, _ = attend(module, *parts, None, s_aux=sinks, **rules)
    torch.manual_seed(5)
    expected = plain(*parts, True, None, 0.7, sinks, Dropped.drawn(0.5))
    assert torch.allclose(found.transpose(1, 2), expected, atol=1e-5)
    for name, none in (("softcap", 0.0), ("s_aux", None), ("dropout", 0.0)):
        torch.manual_seed(5)
        other, _ = attend(module, *parts, None, **{"s_aux": sinks, **rules, name: none})
        assert not torch.allclose(other, found, atol=1e-3), name
    for call, words, wrong in (
        (attend, "the model passes position_bias", {"position_bias": sinks}),
        (attend, "sinks have the shape", {"s_aux": sinks[:3]}),
        (alone(plain)._alone, "sdpa and flash attentions are known to be computed by blocks", {}),
    ):
        refused(ValueError, words, call, module, *parts, None, **wrong)


@pytest.mark.parametrize("kernel", [flash_attention_forward, functools.partial(flash_attention_forward, kernel="hub")])
def test_flash_attentions_have_chunks(kernel, monkeypatch):
    """Padding, windows and documents, as they are told to them."""
    for name, alone_in_its_group in {
        "get_world_size": lambda group: 1,
        "get_rank": lambda group: 0,
        "all_gather": lambda every, own, group: every[0].copy_(own),
        "all_gather_into_tensor": lambda every, own, group: every.copy_(own),
    }.items():
        monkeypatch.setattr(masks.dist, name, alone_in_its_group)
    module = torch.nn.Module()
    module.is_causal = True
    parts = [normal(1, heads, 9, 4, dtype=torch.float32, seed=heads) for heads in (4, 2, 2)]
    places = torch.cat((torch.arange(4), torch.arange(5)))[None]
    kept = torch.ones(1, 9, dtype=torch.bool)
    kept[0, 7:] = False
    for positions, padding, window in ((None, None, None), (places, None, 3), (None, kept, 4), (places, kept, None)):
        given = {"position_ids": positions, "sliding_window": window, "scaling": 0.3}
        found, _ = alone(kernel)._alone(module, *parts, padding, **given)
        every = torch.arange(9)[None] if positions is None else positions
        looks = masks.allowed(every, torch.ones_like(kept) if padding is None else padding, True, window)
        assert torch.allclose(found.transpose(1, 2), plain(*parts, True, looks, 0.0), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_compute_them(dtype, no_scores):
    query, key = normal(1, 2, 9, 4, dtype=dtype, seed=0), normal(1, 1, 9, 4, dtype=dtype, seed=1)
    rows = Rows(query, 1, ScoreRules(0.5, 0.0, torch.zeros(2), Dropped(0.5, 3)))
    rows.see(key, key, True)
    output, lse = rows.result()
    assert output.shape == query.shape and lse.shape == (1, 2, 9, 1) and lse.dtype == torch.float32
    found = block_gradients(query, key, key, output, torch.zeros_like(lse), lse, HALF, True)
    assert [one.shape for one in found] == [query.shape, key.shape, key.shape]


def test_torch_computes_what_kernels_do_not(monkeypatch):
    scores = mock.Mock(wraps=blocks._scores)
    monkeypatch.setattr(blocks, "_scores", scores)
    one = torch.ones(1, 1, 3, 2)
    Rows(one.double(), 1, HALF).see(one.double(), one.double())
    assert scores.call_count == 1


def test_on_meta_no_scores_are_counted(no_scores):
    """A step that is planned has the memory of one that runs."""
    query = torch.empty(1, 2, 9, 4, device="meta")
    rows = Rows(query, 2, HALF)
    rows.see(query, query, True)
    output, lse = rows.result()
    found = block_gradients(query, query, query, output, lse, lse, HALF, True)
    assert all(one.is_meta and one.shape == query.shape for one in (output, *found))


def test_merged_states_are_the_whole():
    query, key, value = (normal(1, 2, n, 4, dtype=torch.float32, seed=n) for n in (7, 12, 13))
    value = value[:, :, :12]
    whole, first, second = (Rows(query, 2, HALF) for _ in range(3))
    whole.see(key, value)
    first.see(key[:, :, :5], value[:, :, :5])
    second.see(key[:, :, 5:], value[:, :, 5:])
    _C.AttentionOps(1).merge([first.high, first.total, first.sum], [second.high, second.total, second.sum])
    torch.testing.assert_close(first.result(), whole.result(), rtol=1e-5, atol=1e-6)


def test_what_is_refused():
    ops, rules, one = _C.AttentionOps(1), _C.BlockRules(1.0), torch.zeros(1, 2, 3, 4)
    state = [torch.zeros(1, 2, 3, size) for size in (1, 1, 4)]
    looks = [_C.BlockRules(1.0, looks=torch.ones(1, 1, 3, 3)), _C.BlockRules(1.0, looks=torch.ones(1, 1, 2, 3).bool())]
    for words, call, *arguments in (
        ("do not belong together", ops.forward, [one, *[torch.zeros(1, 2, 3, 5)] * 2], state, True, rules),
        ("do not belong together", ops.forward, [one, *[one.double()] * 2], state, True, rules),
        ("has 6 numbers of Float here", ops.forward, [one] * 3, [state[2], state[1], state[2]], True, rules),
        ("may look among 3 keys is bool", ops.forward, [one] * 3, state, True, looks[0]),
        ("may look among 3 keys is bool", ops.forward, [one] * 3, state, True, looks[1]),
        ("has not the shape", ops.backward, [one, one, one, one[:, :1]], [state[0]] * 2, [one] * 3, rules),
        ("takes 2 statistics, got 1", ops.backward, [one] * 4, [state[0]], [one] * 3, rules),
        ("states of attention that are merged", ops.merge, state, [state[0], state[1], state[2].double()]),
    ):
        refused(ValueError, words, call, *arguments)
    refused(ValueError, "soft_cap is -1", chunked_attention, one, one, one, 2, soft_cap=-1)
