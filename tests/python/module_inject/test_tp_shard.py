"""Sizes of slices by the published functions of module_inject.tp_shard."""

import random

import pytest

from deepspeed.module_inject import tp_shard
from refusals import refused


@pytest.fixture(autouse=True)
def plain_settings():
    """Each test begins and ends with the defaults."""
    yield
    tp_shard.set_num_kv_heads(None)
    tp_shard.set_tp_grain_size(1)
    tp_shard.set_n_embd(None)


def published(total, ranks, rank, heads, grain, has_heads):
    """The size of a slice by the published formulas, one rank at a time."""
    if heads and total % heads == 0 and has_heads:
        return total * (heads // ranks + (1 if rank < heads % ranks else 0)) // heads
    if total >= grain:
        grains = total // grain
        return (grains // ranks + (1 if rank < grains % ranks else 0)) * grain
    return total // ranks + (1 if rank < total % ranks else 0)


NAMES = {
    None: True, "q_proj": True, "model.layers.0.self_attn.q_proj.weight": True, "lm_head.norm": True,
    "layers.0.mlp.fc1": False, "lm_head": False, "model.lm_head.weight": False, "gpt.embed_out": False,
    "layers.0.experts.3.w2": False, "layers.0.experts.gate_up_proj.bias": False, "layers.0.up_proj": False,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_sizes_equal_the_published_formulas(name):
    draw = random.Random(str(name))
    for _ in range(300):
        total, ranks, grain = draw.randint(1, 600), draw.randint(1, 9), draw.choice([1, 1, 2, 16, 64])
        setting, argument = draw.choice([None, 2, 8, 71]), draw.choice([None, None, 3, 8])
        if draw.random() < 0.7:
            total *= argument or setting or 1
        tp_shard.set_num_kv_heads(setting)
        tp_shard.set_tp_grain_size(grain)
        wanted = [published(total, ranks, rank, argument or setting, grain, NAMES[name]) for rank in range(ranks)]
        assert tp_shard.get_shard_size_list(total, ranks, name, argument) == wanted
        sizes = [tp_shard.get_shard_size(total, ranks, name, rank, num_kv_heads=argument) for rank in range(ranks)]
        assert sizes == wanted
        assert sum(sizes) == total or grain > 1


@pytest.mark.parametrize(
    "total,ranks,heads,grain,wanted",
    [
        (8 * 64, 3, 8, 1, [192, 192, 128]),
        (71 * 64, 8, 71, 1, [576] * 7 + [512]),
        (1001, 4, None, 1, [251, 250, 250, 250]),
        (256, 3, None, 64, [128, 64, 64]),
        (63, 2, None, 64, [32, 31]),
        (64, 4, 2, 1, [32, 32, 0, 0]),
    ],
)
def test_examples(total, ranks, heads, grain, wanted):
    tp_shard.set_tp_grain_size(grain)
    assert tp_shard.get_shard_size_list(total, ranks, num_kv_heads=heads) == wanted


def test_settings_are_read_by_their_published_names():
    assert tp_shard.num_kv_heads is None and tp_shard.tp_grain_size == 1 and tp_shard.get_n_embd() is None
    tp_shard.set_num_kv_heads(4)
    tp_shard.set_tp_grain_size(8)
    tp_shard.set_n_embd(96)
    assert tp_shard.num_kv_heads == tp_shard.get_num_kv_heads() == 4
    assert tp_shard.tp_grain_size == 8 and tp_shard.get_n_embd() == 96


@pytest.mark.parametrize("group,rank,wanted", [(None, 0, 4), (None, 5, 3), ("group", 1, 3)])
def test_a_process_knows_its_rank(monkeypatch, group, rank, wanted):
    ranks = {group: rank}
    monkeypatch.setattr(tp_shard.dist, "get_rank", lambda group=None: ranks[group])
    assert tp_shard.get_shard_size(10, 3, mp_group=group) == wanted


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_of_the_group_is_refused(rank):
    refused(ValueError, f"rank {rank} is none of the 3 ranks", tp_shard.get_shard_size, 10, 3, rank=rank)
