"""Engines with ``tensor_parallel.autotp_size``: refusals, random numbers, all-reduces and saved weights."""

import copy
import functools
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deepspeed
import tensor_models as look_alikes
from deepspeed import comm as dist
from deepspeed.config.sections import TPTrainingConfig
from deepspeed.module_inject.layers import LinearLayer, cut_of
from deepspeed.module_inject.tp_model import cut_over
from deepspeed.utils.random_state import OwnRandomNumbers
from harness import on_ranks
from programs import token_loss
from refusals import refused
from runs import engine_of, settings, together, train

llama = functools.partial(look_alikes.model_of, "llama")


def config(stage=0, size=2, more=(), **others):
    return settings(stage, tensor_parallel={"autotp_size": size, **dict(more)}, **others)


def losses_of(engine, steps=4, name="llama"):
    return train(engine, lambda step, micro: token_loss(name, engine, step, micro), steps)


# ---- what is refused ------------------------------------------------------------------------------------------------
@on_ranks(2, init=True)
def test_different_batches_in_one_group(rank, world):
    engine, tokens = engine_of(llama(), config()), look_alikes.tokens_of(seed=rank)
    words = r"Data inconsistency within the TP group: tensor '{}' of rank 1 .*from that of rank 0 .*\[0, 1\]"
    refused(RuntimeError, words.format("argument 0"), engine, tokens)
    refused(RuntimeError, words.format("input_ids"), engine, input_ids=tokens)
    engine = engine_of(llama(), config())
    refused(RuntimeError, words.format("argument 0"), engine, look_alikes.tokens_of(length=7 + rank))
    engine(look_alikes.tokens_of())
    engine.eval()
    different = engine(tokens)  # evaluation is not looked at
    assert different.shape[:2] == tokens.shape


@on_ranks(2, init=True)
def test_sizes_and_types_that_do_not_fit(rank, world):
    refused(
        ValueError, "autotp_size 3 does not divide the 2 ranks: use one of 1, 2", engine_of, llama(), config(size=3)
    )
    refused(ValueError, "tp_size = 3 does not divide the 2 ranks", deepspeed.tp_model_init, llama(), 3, None)
    for given, wrong, words in (
        ((2, None), {"size": 1}, "tp_size=2.*autotp_size=1"),
        ((2, torch.float32), {"more": {"dtype": "bf16"}}, "dtype=torch.float32.*dtype='bf16'"),
    ):
        model = deepspeed.tp_model_init(llama(), *given)
        refused(ValueError, words, engine_of, model, config(**wrong))
        assert type(model.blocks[0].self_attn.q_proj) is nn.Linear
        refused(ValueError, words, deepspeed.tp_model_init, llama(), *given, config(**wrong))
        refused(ValueError, "make them equal|use the same|of the configuration", engine_of, model, config(**wrong))


# ---- what goes ------------------------------------------------------------------------------------------------------
@on_ranks(2, init=True)
def test_tp_model_init_before_initialize(rank, world):
    expected = losses_of(engine_of(llama(), config()))
    model = deepspeed.tp_model_init(llama(), 2, torch.float32)
    engine = engine_of(model, settings(0))
    assert type(engine.module.blocks[0].self_attn.q_proj) is LinearLayer
    assert losses_of(engine) == expected
    assert type(engine_of(llama(), settings(0)).module.blocks[0].self_attn.q_proj) is nn.Linear


@on_ranks(2, init=True)
def test_a_model_that_is_cut_stays(rank, world):
    group, model = dist.get_world_group(), llama()
    plan = cut_over(model, group)
    layers, shapes = list(model.modules()), [param.shape for param in model.parameters()]
    assert cut_over(model, group) is plan
    engine = engine_of(model, config())
    assert all(map(lambda one, other: one is other, engine.module.modules(), layers))
    assert [param.shape for param in model.parameters()] == shapes
    refused(
        ValueError, "cut over 2 ranks already, .*autotp_size is 1", cut_over, model, dist.new_group([rank]) or group
    )


ALL = {"split_sequence": True, "vocab_parallel_lm_head": True}


@pytest.mark.parametrize("name, more", [("llama", ALL), ("t5", ALL), ("bloom", {}), ("falcon", {})])
@on_ranks(2, init=True)
def test_a_copy_of_a_cut_model_trains_alike(rank, world, name, more):
    model = look_alikes.model_of(name)
    cut_over(model, dist.get_world_group(), TPTrainingConfig(autotp_size=2, **more))
    made = copy.deepcopy(copy.deepcopy(model))
    assert made is not model and not {id(one) for one in made.parameters()} & {id(one) for one in model.parameters()}
    one, other = (losses_of(engine_of(each, config()), name=name) for each in (model, made))
    assert one == other
    for param, copied in zip(model.parameters(), made.parameters()):
        assert torch.equal(param, copied) and cut_of(param) == cut_of(copied)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@on_ranks(2, init=True)
def test_overlap_changes_nothing(rank, world, name):
    engines = [engine_of(look_alikes.model_of(name), config(more={"tp_overlap_comm": flag})) for flag in (False, True)]
    layers = [one for one in engines[1].module.modules() if isinstance(one, LinearLayer)]
    assert layers and all(one.overlap and one.exchange is layers[0].exchange for one in layers)
    for one, other in zip(*(losses_of(engine, name=name) for engine in engines)):
        assert abs(one - other) <= 1e-6 * abs(one)


@on_ranks(2, init=True)
def test_ranks_begin_with_the_weights_of_the_first_and_with_their_random_numbers(rank, world):
    torch.manual_seed(0)
    numbers = torch.get_rng_state()
    torch.manual_seed(rank)
    model = look_alikes.model_of("t5", seed=rank)
    cut_over(model, dist.get_world_group())
    assert torch.equal(torch.get_rng_state(), numbers)
    for (name, param), expected in zip(model.named_parameters(), look_alikes.model_of("t5").parameters()):
        cut = cut_of(param)
        assert torch.equal(param if cut is None else cut.join(param), expected), name


# ---- dropout --------------------------------------------------------------------------------------------------------
class DroppingAttention(look_alikes.LlamaAttention):
    def forward(self, x, angles, cache=None):
        query = look_alikes.heads_of(self.q_proj(x), self.num_heads)
        keys, values = (look_alikes.heads_of(one(x), self.num_heads) for one in (self.k_proj, self.v_proj))
        scores = F.dropout((query @ keys.transpose(-1, -2)).softmax(-1), 0.3, self.training)
        self.seen = scores.detach()
        return F.dropout(self.o_proj((scores @ values).transpose(1, 2).flatten(2)), 0.3, self.training)


class Dropping(look_alikes.LlamaBlock):
    """Some scores and some results of its attention become zero."""

    def __init__(self):
        super().__init__(shared_heads=6)
        self.self_attn = DroppingAttention(48, 6, 6, 8)


@on_ranks(2, init=True)
def test_dropout_leaves_whole_parameters_equal(rank, world):
    torch.manual_seed(3)
    model = look_alikes.Decoder([Dropping() for _ in range(2)], "rotary", 48)
    engine = engine_of(model, config())
    assert any(one.draws for one in engine.module.ds_tensor_plan.blocks["blocks.0"].groups)
    torch.manual_seed(4)
    losses = losses_of(engine, 5)
    whole = {name: param.detach() for name, param in engine.module.named_parameters() if cut_of(param) is None}
    assert "embed.weight" in whole and "blocks.0.input_layernorm.weight" in whole
    zeros = [block.self_attn.seen == 0 for block in engine.module.blocks]
    (first, numbers, dropped), (second, others, other) = together((whole, losses, zeros))
    assert numbers == others
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(one, two) for one, two in zip(dropped, other))


@on_ranks(2, init=True)
def test_ranks_draw_their_own_numbers_between_two_modules(rank, world):
    own, first, last = OwnRandomNumbers(rank), nn.Identity(), nn.Identity()
    first.register_forward_hook(own.begin)
    last.register_forward_pre_hook(own.end)

    def drawn():
        torch.manual_seed(5)
        found = []
        for _ in range(2):
            first(None)
            inside = torch.rand(4)
            last(None)
            found.append((inside, torch.rand(4)))
        return found

    mine, again = drawn(), drawn()
    assert all(torch.equal(*pair) for one, two in zip(mine, again) for pair in zip(one, two))  # a second computation
    assert not torch.equal(mine[0][0], mine[1][0])
    for (inside, behind), (inside_there, behind_there) in zip(*together(mine)):
        assert not torch.equal(inside, inside_there)
        assert torch.equal(behind, behind_there)
    first.eval()
    assert len({str(one[0][0]) for one in together(drawn())}) == 1


# ---- counts ---------------------------------------------------------------------------------------------------------
def counted(call):
    """``(result of the call, {operation: how often the ranks did it meanwhile})``."""
    dist.configure(enabled=True, prof_all=True, prof_ops=[], verbose=False, debug=False)
    dist.reset_log()
    made = call()
    summary = dist.log_summary(return_dict=True).get("summary", {})
    found = {name: sum(row["count"] for row in sizes.values()) for name, sizes in summary.items()}
    dist.configure(enabled=False)
    dist.reset_log()
    return made, found


@on_ranks(2, init=True)
def test_all_reduces_of_blocks(rank, world):
    model = llama()
    cut_over(model, dist.get_world_group())
    blocks = len(model.blocks)
    loss, forward = counted(lambda: model(look_alikes.tokens_of()).square().mean())
    assert forward == {"all_reduce": 2 * blocks}
    _, backward = counted(loss.backward)
    assert backward == {"all_reduce": 2 * blocks}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "t5"])
@on_ranks(2, init=True)
def test_bytes_of_a_rank(rank, world, name):
    model = look_alikes.model_of(name)
    elements = {one: param.numel() for one, param in model.named_parameters()}
    engine = engine_of(model, config())
    cuts = {one: cut_of(param) for one, param in engine.module.named_parameters()}
    own = {one: param.numel() for one, param in engine.module.named_parameters()}
    cut = {one for one, made in cuts.items() if made is not None and made.dim is not None}
    assert sum(own[one] for one in cut) * world == sum(elements[one] for one in cut) > 0.6 * sum(elements.values())
    assert all(own[one] == elements[one] for one in own.keys() - cut)


GATHERED = "stage3_gather_16bit_weights_on_model_save"


# ---- files ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(look_alikes.MODELS))
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2, init=True)
def test_whole_weights_for_other_programs(rank, world, folder, stage, name):
    model = look_alikes.model_of(name, tied=True)
    expected = {one: value.clone() for one, value in model.state_dict().items()}
    engine = engine_of(model, config(stage, zero={GATHERED: True}))
    found = engine._consolidated_16bit_state_dict()
    engine.save_16bit_model(folder, "model.bin")
    saved = torch.load(os.path.join(folder, "model.bin")) if rank == 0 else None
    assert (found is None) == (rank > 0)
    for one in (found, saved) if rank == 0 else ():
        assert list(one) == list(expected)
        assert all(torch.equal(one[key], value) for key, value in expected.items())
