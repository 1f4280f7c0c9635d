"""Biases of attention by head, for the heads of one rank, against loops over all heads."""

import copy
import math
import types

import pytest
import torch

from deepspeed.module_inject import auto_tp_model_utils
from deepspeed.module_inject.auto_tp_model_utils import (
    build_bloom_alibi_tensor,
    build_mpt_alibi_tensor,
    get_alibi_mask,
    install_head_sharded_helper,
)
from refusals import refused

HEADS = [1, 2, 6, 8, 12, 71]
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
MODEL = types.SimpleNamespace


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """A group of these tests is the pair of this rank and the number of ranks."""
    monkeypatch.setattr(auto_tp_model_utils.dist, "get_rank", lambda group=None: group[0])
    monkeypatch.setattr(auto_tp_model_utils.dist, "get_world_size", lambda group=None: group[1])


def slope(head, heads):
    """The slope of one head by the formulas of the paper: heads beyond a power of two lie between the others."""
    power = 2 ** math.floor(math.log2(heads))
    if head < power:
        return 2.0 ** (-8.0 / power * (head + 1))
    return 2.0 ** (-8.0 / (2 * power) * (2 * (head - power) + 1))


def bloom(heads, dtype=torch.float32):
    rows = []
    for tokens in MASK.tolist():
        for head in range(heads):
            seen = [sum(tokens[: place + 1]) for place in range(len(tokens))]
            rows.append([[slope(head, heads) * (count - 1) * token for count, token in zip(seen, tokens)]])
    return torch.tensor(rows, dtype=dtype)


def mpt(heads, length, top=8):
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-top * (head + 1) / power) for head in range(power)]
    slopes = slopes if power == heads else [*slopes[1::2], *slopes[::2]][:heads]
    return torch.tensor([[[slope * (place - length + 1) for place in range(length)]] for slope in slopes])


def baichuan(heads, length):
    rows = range(length)
    return torch.tensor(
        [
            [[slope(head, heads) * at if at <= row else -math.inf for at in rows] for row in rows]
            for head in range(heads)
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_one_rank_has_all_heads(heads, dtype):
    torch.testing.assert_close(build_bloom_alibi_tensor(MASK, heads, dtype), bloom(heads, dtype))
    torch.testing.assert_close(build_mpt_alibi_tensor(MODEL(), heads, 7), mpt(heads, 7))
    torch.testing.assert_close(build_mpt_alibi_tensor(MODEL(), heads, 3, 16, "cpu"), mpt(heads, 3, 16))
    tensor = torch.zeros(1, dtype=dtype)
    torch.testing.assert_close(get_alibi_mask(MODEL(n_head=heads), tensor, 4), baichuan(heads, 4).to(dtype))


def of_all_ranks(ranks, call):
    """Results of ``call(mp_group=...)``, one for each rank."""
    return [call(mp_group=(rank, ranks)) for rank in range(ranks)]


@pytest.mark.parametrize("given", [None, "sizes", "total"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [h for h in HEADS if h > 3])
def test_ranks_have_their_run_of_the_heads(heads, ranks, given):
    even = [heads // ranks + (rank < heads % ranks) for rank in range(ranks)]
    sizes = even[::-1] if given else even
    options = {"head_shard_sizes": sizes} if given else {}

    def count(mp_group):
        total = {"total_num_heads": heads} if given == "total" else {}
        return sizes[mp_group[0]] if total else heads, {**options, **total, "mp_group": mp_group}

    def of_bloom(mp_group):
        heads_of_call, rest = count(mp_group)
        return build_bloom_alibi_tensor(MASK, heads_of_call, torch.float32, **rest).unflatten(0, (2, -1))

    def of_mpt(mp_group):
        heads_of_call, rest = count(mp_group)
        return build_mpt_alibi_tensor(MODEL(), heads_of_call, 7, **rest)

    def of_baichuan(mp_group):
        return get_alibi_mask(MODEL(n_head=heads), torch.zeros(1), 4, **count(mp_group)[1])

    runs = of_all_ranks(ranks, of_mpt)
    assert [len(run) for run in runs] == sizes
    torch.testing.assert_close(torch.cat(runs), mpt(heads, 7))
    whole = torch.cat(of_all_ranks(ranks, of_bloom), dim=1).flatten(0, 1)
    torch.testing.assert_close(whole, bloom(heads))
    torch.testing.assert_close(torch.cat(of_all_ranks(ranks, of_baichuan)), baichuan(heads, 4))


def test_numbers_of_heads_that_disagree_are_refused():
    def build(heads, **options):
        build_bloom_alibi_tensor(MASK, heads, torch.float32, mp_group=(1, 2), **options)

    refused(
        ValueError, r"head_shard_sizes \[3, 3\] do not spread 8 heads over the 2", build, 8, head_shard_sizes=[3, 3]
    )
    refused(ValueError, r"\[4, 2, 2\] do not spread 8 heads over the 2", build, 8, head_shard_sizes=[4, 2, 2])
    refused(ValueError, "num_heads is 3, and rank 1 of mp_group has 4 of 8", build, 3, total_num_heads=8)
    whole = MODEL(n_head=8, get_alibi_mask_orig=lambda tensor, length: torch.zeros(4, length, length))
    refused(ValueError, "has returned 4 heads of 8", get_alibi_mask, whole, torch.zeros(1), 3)


class Mpt(torch.nn.Module):
    def build_mpt_alibi_tensor(self, num_heads, sequence_length, alibi_bias_max=8, device=None):
        return torch.arange(num_heads)[:, None, None] * alibi_bias_max + torch.arange(sequence_length, device=device)


class Baichuan(torch.nn.Module):
    n_head = 6

    def get_alibi_mask(self, tensor, seq_length_with_past):
        return torch.arange(self.n_head).to(tensor)[:, None, None].expand(-1, 9, 9)


class Bloom(torch.nn.Module):
    def build_alibi_tensor(self, attention_mask, num_heads, dtype):
        raise NotImplementedError


@pytest.mark.parametrize("heads_of_call", [6, 4])
def test_what_the_model_computes_is_cut(heads_of_call):
    model, other = Mpt(), Mpt()
    for _ in range(2):  # the second time it still finds the model's own function
        install_head_sharded_helper(model, "build_mpt_alibi_tensor", build_mpt_alibi_tensor, (0, 2), 6, 3)
    whole = other.build_mpt_alibi_tensor(6, 5, 2)
    assert torch.equal(model.build_mpt_alibi_tensor(heads_of_call, 5, 2, "cpu"), whole[:4])
    assert whole.shape[0] == 6 and torch.equal(copy.deepcopy(model).build_mpt_alibi_tensor(6, 5, 2), whole[:4])


def test_a_mask_of_the_model_is_cut_in_all_its_dimensions():
    model = Baichuan()
    install_head_sharded_helper(model, "get_alibi_mask", get_alibi_mask, (2, 3), 6)
    assert torch.equal(model.get_alibi_mask(torch.zeros(1), 5), torch.tensor([4.0, 5.0])[:, None, None].expand(2, 5, 5))


def test_a_helper_without_the_model_is_installed_as_it_is():
    model = Bloom()
    install_head_sharded_helper(model, "build_alibi_tensor", build_bloom_alibi_tensor, (1, 2), 8)
    wanted = bloom(8).unflatten(0, (2, 8))[:, 4:].flatten(0, 1)
    torch.testing.assert_close(model.build_alibi_tensor(MASK, 8, torch.float32), wanted)
    install_head_sharded_helper(model, "build_alibi_tensor", build_bloom_alibi_tensor)
    torch.testing.assert_close(model.build_alibi_tensor(MASK, 6, torch.float32), bloom(6))


@pytest.mark.parametrize(
    "ranks,heads,kv,sizes",
    [(3, 32, 8, [12, 12, 8]), (2, 6, 3, [4, 2]), (8, 71, 1, [9] * 7 + [8]), (4, 6, 2, [2, 2, 1, 1]),
     (3, 8, 2, [4, 4, 0]), (3, 8, None, [3, 3, 2]), (3, 8, 5, [3, 3, 2])],
)  # fmt: skip
def test_heads_are_cut_between_their_key_value_heads(ranks, heads, kv, sizes):
    found = []
    for rank in range(ranks):
        model = Mpt()
        install_head_sharded_helper(model, "build_mpt_alibi_tensor", build_mpt_alibi_tensor, (rank, ranks), heads, kv)
        found.append(len(model.build_mpt_alibi_tensor(heads, 2)))
    assert found == sizes
