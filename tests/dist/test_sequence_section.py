"""The section ``sequence_parallel``: models of transformers share sequences, are tiled and cut without a change, with
the losses and parameters of one process."""

import sys
from unittest import mock

import pytest
import torch

import toy_transformers
from deepspeed.comm.mesh import made_here
from deepspeed.sequence import hf_attention, weighted_loss
from deepspeed.utils import groups
from harness import on_ranks
from refusals import refused
from runs import take_step, weight_list
from sequence_models import plain_sgd, sgd_engine

LENGTH, RATE, STEPS = 32, 0.3, 3


def start(model, stage=1, **section):
    return sgd_engine(model, stage, RATE, sequence_parallel=section)


def batch_of(step):
    tokens = torch.randint(0, 31, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
    labels[0, 3:9] = -100
    return tokens, labels


def model_of(heads):
    return toy_transformers.ToyForCausalLM(*heads, hidden=4 * heads[0])


def reference(heads):
    def loss_at(model, step, part):
        tokens, labels = batch_of(step)
        return model(tokens, shift_labels=labels).loss

    return plain_sgd(model_of(heads), RATE, loss_at, STEPS)


def train_case(rank, world, heads, hosts, recompute, how):
    """The largest gap to one process, and what the model has done."""
    model = model_of(heads).train()
    if recompute:
        model.gradient_checkpointing_enable()
    engine = start(model, size=world, **how)
    with mock.patch.object(hf_attention, "hosts_of", (lambda group: list(hosts)) if hosts else hf_attention.hosts_of):
        found, moved = [], 0
        for step in range(STEPS):
            tokens, labels = (one.chunk(world, 1)[rank] for one in batch_of(step))
            loss = engine(tokens, shift_labels=labels).loss
            moved = max([moved, *(store.waiting for store in made_here().stores.values())])
            loss = weighted_loss(loss, labels, engine.seq_parallel_group) if world > 1 else loss
            found.append(take_step(engine, loss))
    plain = reference(heads)
    gaps = [float((a - b).abs().max()) for a, b in zip(weight_list(engine), plain.params.values())]
    entry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS["sdpa"]
    rings = [made._ring for _, made, _ in getattr(entry, "shared", [])]
    made_here().stores.clear()  # their threads end
    tallest = max(layer.mlp.most for layer in model.model.layers)
    engine.destroy()
    return max([*gaps, *(abs(a - b) for a, b in zip(found, plain.means))]), bool(rings and rings[0]), tallest, moved


WORLDS = {
    1: [
        ((4, 2), None, False, {"tile_mlp": True, "tile_loss": True}),
        ((4, 2), None, True, {"offload": "file", "chunk": 5}),
        ((4, 2), None, True, {"offload": "host", "stage": 3, "tile_mlp": ["model.layers.1.mlp"]}),
    ],
    2: [
        ((4, 2), None, False, {"tile_loss": True, "stage": 0}),
        ((5, 1), None, True, {"chunk": 4, "offload": "file", "stage": 2}),
        ((4, 2), None, False, {"method": "ring", "stage": 3}),
        ((4, 2), "ab", False, {}),
    ],
    4: [
        ((8, 2), None, False, {"method": "both"}),
        ((2, 1), None, False, {}),
        ((8, 4), "aabb", True, {"stage": 2}),
        ((4, 4), "aabb", False, {"method": "ulysses", "tile_mlp": True}),
    ],
}


@pytest.mark.parametrize("world", WORLDS)
@on_ranks(timeout=120)
def test_trains_as_one_process(rank, world, folder):
    for heads, hosts, recompute, how in WORLDS[world]:
        place = {"folder": folder} if how.get("offload") == "file" else {}
        with toy_transformers.installed():
            gap, ring, tallest, moved = train_case(rank, world, heads, hosts, recompute, {**how, **place})
        groups.clear()
        assert gap < 2e-5, (heads, how)
        wanted = how.get("method") in ("ring", "both") or heads[0] < world or hosts is not None
        assert ring == (wanted and how.get("method") != "ulysses"), (heads, how)
        tile = 4 * heads[0] if how.get("tile_mlp") is True else LENGTH
        assert tallest == min(tile, LENGTH // world), (heads, how)
        assert (moved > 0) == (how.get("offload") == "file"), (heads, how)


def no_transformer():
    return torch.nn.Linear(2, 2)


def odd():
    return toy_transformers.ToyForCausalLM(implementation="odd")


# words of the error, the model, and its section; the size is that of the world
BAD = [
    (
        '"ulysses" needs a head for each rank.*1 heads for 2 ranks. Sizes up to 1 work',
        lambda: toy_transformers.ToyForCausalLM(1, 1), {"method": "ulysses"},
    ),
    (
        '"both" needs neighbours on one host.*2 ranks with 4 heads.*4, 6, 8',
        toy_transformers.ToyForCausalLM, {"method": "both"},
    ),
    (
        "sequence_parallel.method is for models of transformers, and Linear is none",
        no_transformer, {"method": "ring"},
    ),
    ("sequence_parallel.chunk is for models of transformers", no_transformer, {"size": 1, "chunk": 4}),
    (
        "tile_mlp is true, but Linear has no module that is called like an MLP",
        no_transformer, {"size": 1, "tile_mlp": True},
    ),
    (
        "tile_loss is true, but Linear is not a causal language model", no_transformer, {"size": 1, "tile_loss": True},
    ),
    ('method "ring" computes attention in a ring: only sdpa and flash attentions are known', odd, {"method": "ring"}),
    ("sequence_parallel.chunk computes attention by blocks: only sdpa and flash attentions", odd, {"chunk": 4}),
]  # fmt: skip


def forward_of(model, how, rank, world):
    try:
        start(model(), **{"size": world, **how})(batch_of(0)[0].chunk(world, 1)[rank])
    finally:
        groups.clear()


@on_ranks(2, init=True, timeout=60)
def test_the_impossible_is_refused_on_every_rank(rank, world):
    with toy_transformers.installed():
        for words, model, how in BAD:
            refused(ValueError, f"(?s){words}", forward_of, model, how, rank, world)
