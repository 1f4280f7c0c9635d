"""Multimodal models on shared sequences: vision towers, pictures in the text, what is found in a model."""

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.sequence import (
    InternVLFusionAdapter,
    LlavaFusionAdapter,
    ModalityFusionSPAdapter,
    Qwen2VLFusionAdapter,
    UlyssesSPViTAttention,
    auto_wrap_model_for_sp,
    detect_model_sp_info,
)
from deepspeed.sequence.layer import DistributedAttention
from harness import on_ranks
from models import Parts, seeded
from refusals import refused
from sequence_models import attend, part, worst

WIDTH = 8


class ToyVisionAttention(torch.nn.Module):
    def __init__(self, pair=False):
        super().__init__()
        torch.manual_seed(1)
        self.qkv, self.pair = torch.nn.Linear(WIDTH, 3 * WIDTH).double(), pair

    def forward(self, hidden_states, scale=None):
        q, k, v = (x.unflatten(-1, (2, -1)) for x in self.qkv(hidden_states).chunk(3, -1))
        out = attend(q, k, v, scale=scale).flatten(2)
        return (out, None) if self.pair else out


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("has_cls, pair", [(True, False), (False, True)])
@on_ranks(init=True)
def test_vision_attention(rank, world, has_cls, pair):
    attn, plain = ToyVisionAttention(pair), ToyVisionAttention()
    made = UlyssesSPViTAttention(attn, dist.get_world_group(), has_cls_token=has_cls)
    first = int(has_cls)
    whole = normal(2, first + 12, WIDTH).requires_grad_()
    expected = plain(whole, scale=0.3)
    upper = normal(2, 12, WIDTH, seed=3)
    (expected[:, first:] * upper).sum().backward()
    patches = part(whole[:, first:], rank, world, 1)
    own = whole[:, :first].detach().clone().requires_grad_()
    found = made(torch.cat((own, patches), 1), scale=0.3)
    if pair:
        assert found[1] is None
        found = found[0]
    (found[:, first:] * part(upper, rank, world, 1).detach()).sum().backward()
    pairs = [(found[:, first:], part(expected[:, first:], rank, world, 1)), (found[:, :first], expected[:, :first])]
    pairs.append((patches.grad, part(whole.grad[:, first:], rank, world, 1)))
    # Every rank has a copy of what is not shared: together their gradients are those of one process.
    for mine, other in [(own.grad, whole.grad[:, :first])] if has_cls else []:
        dist.all_reduce(mine)
        pairs.append((mine, other))
    dist.all_reduce(attn.qkv.weight.grad)
    pairs.append((attn.qkv.weight.grad, plain.qkv.weight.grad))
    assert worst(pairs) < 1e-12


@on_ranks(2, init=True, timeout=60)
def test_vision_parts_of_different_lengths_are_refused(rank, world):
    attention = UlyssesSPViTAttention(ToyVisionAttention(), dist.get_world_group())
    refused(ValueError, "rank 0: 3, rank 1: 4", attention, normal(2, 3 + rank, WIDTH))


# ---- pictures in the text --------------------------------------------------------------------------------------------
IMAGE, START, END = 50, 51, 52


def made_of(kind, projection, group):
    if kind == "llava":
        return LlavaFusionAdapter(projection, group)
    if kind == "qwen":
        return Qwen2VLFusionAdapter(projection, group, START, END)
    return InternVLFusionAdapter(projection, group, image_token_id=IMAGE)


def text_of(kind):
    """Ids of two rows with four visual features each, and where those are in the whole sequence."""
    if kind == "llava":  # one token for the picture, or two for its halves
        rows = [[1, -200, 2, 3, 4], [1, 2, 3, 4, -200]]
        return torch.tensor(rows), torch.tensor([[1, 2, 3, 4], [4, 5, 6, 7]])
    if kind == "qwen":
        rows = [[1, START, 0, 0, 0, 0, END, 3], [START, 0, 0, END, START, 0, 0, END]]
        return torch.tensor(rows), torch.tensor([[2, 3, 4, 5], [1, 2, 5, 6]])
    rows = [[IMAGE, 1, 2, IMAGE, IMAGE, IMAGE, 3, 4], [1, 2, 3, 4, IMAGE, IMAGE, IMAGE, IMAGE]]
    return torch.tensor(rows), torch.tensor([[0, 3, 4, 5], [4, 5, 6, 7]])


def body_fusion(rank, world, kind):
    projection = seeded(torch.nn.Linear, 3, WIDTH, seed=2).double()
    ids, where = text_of(kind)
    embeds, visual = normal(*ids.shape, WIDTH), normal(2, 4, 3, seed=1).requires_grad_()
    adapter = made_of(kind, projection, dist.get_world_group())
    assert kind == "qwen" or isinstance(adapter, ModalityFusionSPAdapter)
    mine = part(visual, rank, world, 1)
    found = adapter(mine, embeds, ids)
    projected, whole = projection(visual), torch.zeros(2, 8, WIDTH, dtype=torch.float64)
    for row in range(2):
        text = torch.ones(8, dtype=torch.bool)
        text[where[row]] = False
        replaced = torch.zeros_like(ids[row], dtype=torch.bool)
        replaced[where[row][:1] if kind == "llava" else where[row]] = True
        whole[row, text], whole[row, where[row]] = embeds[row, ~replaced], projected[row]
    upper = normal(2, 8, WIDTH, seed=4)
    (whole * upper).sum().backward()
    expected = projection.weight.grad.clone()
    projection.zero_grad()
    (found * part(upper, rank, world, 1).detach()).sum().backward()
    dist.all_reduce(projection.weight.grad)
    return worst(
        [
            (found, part(whole, rank, world, 1)),
            (mine.grad, part(visual.grad, rank, world, 1)),
            (projection.weight.grad, expected),
        ]
    )


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks(init=True)
def test_fusion(rank, world):
    assert max(body_fusion(rank, world, kind) for kind in ("llava", "intern", "qwen")) < 1e-12


@on_ranks(2, init=True, timeout=60)
def test_bad_fusion(rank, world):
    intern, qwen = (made_of(kind, torch.nn.Identity(), dist.get_world_group()) for kind in ("intern", "qwen"))
    ids, starts = torch.tensor([[1, IMAGE, IMAGE, IMAGE]]), torch.tensor([[START, 1, 1, 1]])
    for words, adapter, features, text, tokens in (
        ("4 visual features for 3 image tokens", intern, 2, 4, ids),
        ("do not belong to text_embeds", intern, 2, 3, ids),
        ("have 7 tokens: all must have the same number, a multiple of the 2 ranks", intern, 3, 2, ids[:, :2]),
        ("do not come in pairs", qwen, 2, 4, starts),
    ):
        refused(ValueError, words, adapter, normal(1, features, 4), normal(1, text, 4), tokens)


# ---- models ----------------------------------------------------------------------------------------------------------
class CoreAttention(torch.nn.Module):
    def forward(self, query, key, value):
        return attend(query, key, value, "causal")


def multimodal():
    return Parts(
        None,
        vision_tower=Parts(
            None,
            embeddings=Parts(None, class_embedding=torch.nn.Parameter(torch.zeros(WIDTH))),
            layers=torch.nn.ModuleList([ToyVisionAttention(), ToyVisionAttention()]),
        ),
        multi_modal_projector=torch.nn.Linear(WIDTH, WIDTH),
        language_model=torch.nn.ModuleList([CoreAttention()]),
    )


def test_what_is_found():
    model = multimodal()
    info = detect_model_sp_info(model)
    assert [name for name, _ in info.vit_attn_modules] == ["vision_tower.layers.0", "vision_tower.layers.1"]
    assert info.llm_attn_modules == [("language_model.0", model.language_model[0])]
    assert info.vision_projection_module == ("multi_modal_projector", model.multi_modal_projector)
    assert detect_model_sp_info(torch.nn.Linear(1, 1)).vision_projection_module is None


class MyAttention(torch.nn.Module):
    def forward(self, hidden_states):
        return hidden_states


@on_ranks(2, init=True)
def test_wrapped(rank, world):
    model, group = multimodal(), dist.get_world_group()
    assert auto_wrap_model_for_sp(model, group) is model
    assert all(type(one) is UlyssesSPViTAttention and one.has_cls_token for one in model.vision_tower.layers)
    assert type(model.language_model[0]) is DistributedAttention
    whole = [normal(2, 4, 4, 3, seed=seed) for seed in range(3)]
    found = model.language_model[0](*(part(x, rank, world, 1) for x in whole), 0)
    refused(
        ValueError,
        "has no attention that sequence parallelism knows",
        auto_wrap_model_for_sp,
        torch.nn.Linear(1, 1),
        group,
    )
    refused(
        ValueError,
        "'0' takes no query, key and value",
        auto_wrap_model_for_sp,
        torch.nn.Sequential(MyAttention()),
        group,
    )
    assert worst([(found, part(attend(*whole, "causal"), rank, world, 1))]) < 1e-12
