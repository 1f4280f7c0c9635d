"""Blocks between which each rank has a part of every sequence (``tensor_parallel.split_sequence``)."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tensor_models as look_alikes
from deepspeed import comm as dist
from deepspeed.module_inject.layers import cut_of
from deepspeed.module_inject.tensor_proof import PlanError
from harness import on_ranks
from programs import token_loss
from refusals import refused
from runs import engine_of, settings, together, train

llama = functools.partial(look_alikes.model_of, "llama")


def config(stage=0, size=2, **more):
    return settings(stage, tensor_parallel={"autotp_size": size, "split_sequence": True, **more})


def losses_of(engine, steps=3, name="llama"):
    return train(engine, lambda step, micro: token_loss(name, engine, step, micro), steps)


@on_ranks(2, init=True)
def test_norms_see_a_part_and_layers_all(rank, world):
    engine, seen = engine_of(llama(), config()), {}

    def see(name, module, args, made):
        seen[name] = args, made

    for name, module in engine.module.named_modules():
        module.register_forward_hook(functools.partial(see, name))
    engine(look_alikes.tokens_of(length=7))
    own = 4 - rank  # of seven tokens
    for block in ("blocks.0", "blocks.1"):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            assert seen[f"{block}.{norm}"][1].shape[1] == own
        assert seen[f"{block}.self_attn.q_proj"][1].shape[1] == 7 and seen[f"{block}.mlp.up_proj"][1].shape[1] == 7
        assert seen[f"{block}.self_attn"][1].shape[1] == own and seen[f"{block}.mlp"][1].shape[1] == own
    assert seen["blocks.0"][1].shape[1] == own and seen["blocks.1"][1].shape[1] == 7 and seen["norm"][1].shape[1] == 7


@on_ranks(2, init=True)
def test_evaluation_and_short_sequences(rank, world):
    model, tokens = llama(), look_alikes.tokens_of()
    engine = engine_of(copy.deepcopy(model), config())
    for length in (7, 2, 1):  # a token for one rank and none for the other, where gradients are wanted
        short = tokens[:, :length]
        assert torch.allclose(engine(short), model(short), atol=1e-5)
        with torch.no_grad():
            assert torch.allclose(engine(short), model(short), atol=1e-5)
        engine(short).sum().backward()
        model(short).sum().backward()
        for (name, param), wanted in zip(engine.module.named_parameters(), model.parameters()):
            grad = wanted.grad if cut_of(param) is None else cut_of(param).own(wanted.grad)
            assert torch.allclose(param.grad, grad, atol=1e-4), (name, length)
    engine.eval()
    assert torch.equal(engine.module.generate(tokens, use_cache=True), model.eval().generate(tokens))


class Recomputed(look_alikes.LlamaBlock):
    """Its forward runs again in backward."""

    def forward(self, x, angles, cache=None):
        return (
            checkpoint(super().forward, x, angles, cache, use_reentrant=False)
            if self.training
            else super().forward(x, angles)
        )


class Model(look_alikes.Decoder):
    """A model that recomputes whole blocks, as transformers does, and can draw dropout around them."""

    recompute, drop = False, 0.0

    def forward(self, input_ids, cache=None):
        x, angles = self.embed(input_ids), look_alikes.angles_of(0, input_ids.shape[1], self.head_dim, input_ids.device)
        for block in self.blocks:
            x = F.dropout(x, self.drop, self.training) if block is self.blocks[0] else x
            x = checkpoint(block, x, angles, use_reentrant=False) if self.recompute else block(x, angles)
        return self.lm_head(self.norm(x))


class DroppingBlock(look_alikes.LlamaBlock):
    """Dropout inside of the attention and outside."""

    def forward(self, x, angles, cache=None):
        made = F.dropout(self.self_attn(self.input_layernorm(x), angles, cache), 0.3, self.training)
        self.seen = (made.detach() == 0).float().mean(), made.shape
        return x + made + F.dropout(self.mlp(self.post_attention_layernorm(x)), 0.3, self.training)


def model_of(block, **attributes):
    torch.manual_seed(0)
    made = Model([block() for _ in range(2)], "rotary", 48)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@on_ranks(2, init=True)
def test_blocks_that_run_again_in_backward(rank, world):
    expected = losses_of(engine_of(model_of(look_alikes.LlamaBlock), settings(0)))
    for stage in (0, 3):
        found = losses_of(engine_of(model_of(look_alikes.LlamaBlock, recompute=True), config(stage)))
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2, init=True)
def test_dropout(rank, world, recompute):
    engine = engine_of(model_of(DroppingBlock, drop=0.1, recompute=recompute), config())
    losses_of(engine)
    zeros, shape = engine.module.blocks[0].seen
    assert 0.2 < zeros < 0.4 and shape[1] == 4 - rank
    torch.manual_seed(rank)  # numbers of evaluation do not matter
    whole = {
        name: one.detach().clone() for name, one in engine.module.named_parameters() if one.shape == cut_shape(one)
    }
    assert len(whole) > 5
    for name, theirs in together(whole)[0].items():
        assert torch.equal(theirs, whole[name]), name


def cut_shape(param):
    made = cut_of(param)
    return param.shape if made is None else made.whole_shape(param.shape)


@on_ranks(2, init=True)
def test_ranks_drop_different_tokens(rank, world):
    engine = engine_of(model_of(DroppingBlock), config())
    masks = []
    engine.module.blocks[0].self_attn.register_forward_hook(lambda *given: masks.append(torch.rand(4)))
    engine(look_alikes.tokens_of(length=8))
    state = torch.rand(3)
    (mask, behind), (other, behind_there) = together((masks[0], state))
    assert not torch.equal(mask, other), "the ranks draw the same for other tokens"
    assert torch.equal(behind, behind_there), "behind the blocks the ranks draw alike"


# ---- what is refused ------------------------------------------------------------------------------------------------
class Mixing(look_alikes.LlamaBlock):
    """Has a mean over the tokens outside of its layers."""

    def forward(self, x, angles, cache=None):
        return super().forward(x, angles, cache) + x.mean(1, keepdim=True)


class Pooled(look_alikes.Decoder):
    """Leaves out every second token between its blocks."""

    def forward(self, input_ids, cache=None):
        x, short = self.embed(input_ids), self.training
        for index, block in enumerate(self.blocks):
            angles = look_alikes.angles_of(0, input_ids.shape[1], self.head_dim, x.device)
            x = block(x, angles)
            x = x[:, ::2] if short and not index and hasattr(self, "pools") else x
            if hasattr(self, "ends"):
                break
        return self.lm_head(self.norm(x))


@on_ranks(2, init=True)
def test_models_that_need_whole_sequences(rank, world):
    refused(PlanError, "has a part of every sequence: .*Leave tensor_parallel.split_sequence out", engine_of,
            model_of(Mixing), config())  # fmt: skip
    refused(ValueError, "tp_overlap_comm overlaps all-reduces", engine_of, llama(), config(tp_overlap_comm=True))
    refused(ValueError, "a list of blocks was not found", engine_of, look_alikes.LlamaBlock(), config())
    tokens = look_alikes.tokens_of(length=8)
    for attribute, words in (
        ("pools", "the model changes the sequence"),
        ("ends", "'blocks.1', the last.*did not run"),
    ):
        torch.manual_seed(0)
        model = Pooled([look_alikes.LlamaBlock() for _ in range(2)], "rotary", 48)
        engine = engine_of(model, config())
        engine(tokens)
        setattr(engine.module, attribute, True)
        refused(RuntimeError, words, engine, tokens)
    engine = engine_of(llama(), config())
    refused(ValueError, "output_hidden_states=True needs whole sequences", engine, tokens, output_hidden_states=True)
    assert dist.get_world_size() == world and isinstance(engine.module, nn.Module)
