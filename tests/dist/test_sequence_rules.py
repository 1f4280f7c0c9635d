"""Soft caps, attention sinks and dropout where ranks share a sequence, by exchange, in rings and in chunks: outputs and
gradients of one plain process, whose dropout is that of the same state of torch's generator."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepspeed import comm as dist
from deepspeed.ops.attention.blocks import Dropped
from deepspeed.sequence import masks
from deepspeed.sequence.hf_attention import UlyssesSPAttentionHF
from harness import on_ranks
from sequence_models import part, projections, worst

SIZE, CAP, DROP = 4, 0.8, 0.3


def sdpa_attention_forward(module, query, key, value, mask, scaling, softcap=None, s_aux=None, **kwargs):
    """Attention as it is written down, under the name that blocks ask for."""
    key, value = (one.repeat_interleave(module.num_key_value_groups, 1) for one in (key, value))
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    looks = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if mask is None else mask
    scores = scores.masked_fill(~looks, float("-inf"))
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    used = scores.softmax(-1)[..., : key.shape[2]]
    if module.dropped is not None:
        used = used * module.dropped.mask(used[:, :, None], (0, 0))[:, :, 0]
    return torch.matmul(used, value).transpose(1, 2), None


class Attention(torch.nn.Module):
    """Two layers in one, so that a step draws two seeds."""

    def __init__(self, attention, heads, kv, rules):
        super().__init__()
        self.attention, self.num_key_value_groups, self.is_causal, self.dropped = attention, heads // kv, True, None
        made = torch.randn(heads, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        self.sinks, self.rules = torch.nn.Parameter(made), rules

    def forward(self, query, key, value, positions, mask):
        more = {"softcap": CAP if "cap" in self.rules else None, "s_aux": self.sinks if "sinks" in self.rules else None}
        more["dropout"] = DROP if "dropout" in self.rules else 0.0
        for _ in range(2):
            parts = (one.transpose(1, 2) for one in (query, key, value))
            if self.attention is sdpa_attention_forward:
                self.dropped = Dropped.drawn(more["dropout"])
            query = self.attention(self, *parts, mask, position_ids=positions, scaling=0.6, **more)[0]
        return query


def rules_case(rank, world, method, chunk, heads, kv, kind, rules, dtype):
    length, group = 4 * world + (2 if method == "auto" and world == 3 else 0) * world, dist.get_world_group()
    whole = [one.requires_grad_() for one in projections(heads, kv, SIZE, length)]
    positions = torch.arange(length).expand(2, length)
    if kind == "packed":
        positions = torch.cat((torch.arange(5), torch.arange(length - 5))).expand(2, length)
    kept = torch.ones(2, length, dtype=torch.bool)
    if kind == "padded":
        kept[1, 3:] = False  # of some ranks nothing
    looks = masks.allowed(positions, kept, True, None)
    plain = Attention(sdpa_attention_forward, heads, kv, rules)
    torch.manual_seed(11)
    expected = plain(*whole, positions, looks)
    upper = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    upper *= kept[..., None, None]
    (expected * upper).sum().backward()

    shared = UlyssesSPAttentionHF(sdpa_attention_forward, 2, heads, SIZE, kv, 2, group, seq_length_is_variable=True)
    shared.configure(method, chunk)
    model = Attention(shared, heads, kv, rules).to(dtype)
    mine = [part(one.to(dtype), rank, world, 1) for one in whole]
    places, padding = part(positions, rank, world, 1), part(kept, rank, world, 1) if kind == "padded" else None
    torch.manual_seed(11)
    out = checkpoint(model, *mine, places, padding, use_reentrant=False)
    torch.manual_seed(5)  # backward goes back to the state of forward
    (out * part(upper.to(dtype), rank, world, 1).detach()).sum().backward()
    here = part(kept, rank, world, 1)[..., None, None]
    pairs = [(out * here, part(expected, rank, world, 1) * here)]
    pairs += [(x.grad, part(y.grad, rank, world, 1)) for x, y in zip(mine, whole)]
    if "sinks" in rules:
        dist.all_reduce(model.sinks.grad)
        pairs.append((model.sinks.grad, plain.sinks.grad))
    assert (shared._ring is not None) == (not chunk and method != "ulysses")
    return worst(pairs)


ALL = ("cap", "sinks", "dropout")
CASES = {
    2: [
        ("ring", 0, 2, 2, "causal", ("cap",), torch.float64),
        ("ring", 0, 2, 1, "padded", ("sinks",), torch.float64),
        ("ring", 0, 4, 2, "packed", ("dropout",), torch.float64),
        ("ring", 0, 4, 2, "causal", ALL, torch.float32),
        ("ulysses", 3, 4, 2, "causal", ("sinks",), torch.float64),
        ("ulysses", 3, 5, 1, "packed", ("dropout",), torch.float64),
        ("ulysses", 5, 6, 3, "padded", ALL, torch.float32),
        ("ulysses", 0, 4, 2, "causal", ("cap", "sinks"), torch.float64),
    ],
    3: [
        ("ring", 0, 4, 1, "padded", ALL, torch.float64),
        ("ulysses", 5, 5, 1, "causal", ALL, torch.float64),
        ("auto", 5, 2, 1, "packed", ALL, torch.float64),
    ],
    4: [
        ("both", 0, 4, 2, "packed", ALL, torch.float64),
        ("both", 0, 3, 1, "causal", ALL, torch.float32),
        ("auto", 0, 2, 2, "padded", ALL, torch.float64),
        ("ulysses", 7, 5, 1, "causal", ALL, torch.float32),
    ],
}


@pytest.mark.parametrize("world", CASES)
@on_ranks(init=True, timeout=120)
def test_equal_one_process(rank, world):
    for case, gap in zip(CASES[world], [rules_case(rank, world, *case) for case in CASES[world]]):
        assert gap < (1e-11 if case[-1] is torch.float64 else 2e-5), case
