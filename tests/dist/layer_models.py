"""Transformers whose layers drop tokens or are left out, in the shapes of GPT-2, BERT and ViT."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import beside

LAYERS, WIDTH, LENGTH, WORDS = 4, 16, 12, 29


class Block(nn.Module):
    """A pre-LN layer. ``batch_first``: hidden states are [samples, tokens, width]. ``returns``: alone or in a tuple."""

    def __init__(self, width=WIDTH, heads=2, causal=True, batch_first=True, in_tuple=False):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads, self.causal, self.batch_first, self.in_tuple = heads, causal, batch_first, in_tuple

    def forward(self, hidden_states, attention_mask=None):
        x = hidden_states if self.batch_first else hidden_states.transpose(0, 1)
        samples, tokens, width = x.shape
        query, key, value = (
            one.view(samples, tokens, self.heads, -1).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1)
        )
        scores = query @ key.transpose(2, 3) / (width // self.heads) ** 0.5
        if self.causal:
            scores = scores + torch.full((tokens, tokens), -1e9, device=x.device).triu(1)
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, -1e9)
        x = x + self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(x.shape))
        x = x + self.mlp(x)
        x = x if self.batch_first else x.transpose(0, 1)
        return (x, None) if self.in_tuple else x


class Transformer(nn.Module):
    """``layers`` blocks over words, or over rows of numbers (``words`` None, as ViT's patches). ``reentrant``: kind of
    checkpointing, or None. ``masked``: layers get a mask that leaves out the last tokens of some samples."""

    def __init__(self, layers=LAYERS, width=WIDTH, words=WORDS, reentrant=None, masked=False, seed=0, **block):
        super().__init__()
        torch.manual_seed(seed)
        self.into = nn.Embedding(words, width) if words else nn.Linear(width, width)
        self.h = nn.ModuleList(Block(width, **block) for _ in range(layers))
        self.head = nn.Linear(width, words or width)
        self.reentrant, self.masked = reentrant, masked

    def forward(self, batch):
        batch = beside(self.head.weight, batch)
        x, mask = self.into(batch), None
        if self.masked:
            alive = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            alive[::2, -2:] = False
            mask = alive[:, None, None, :]
        first = self.h[0]
        x = x if first.batch_first else x.transpose(0, 1)
        for layer in self.h:
            if self.reentrant is None:
                x = layer(x, attention_mask=mask)
            else:
                x = checkpoint(layer, x, mask, use_reentrant=self.reentrant)
            x = x[0] if isinstance(x, tuple) else x
        x = x if first.batch_first else x.transpose(0, 1)
        return self.head(x)


class Words(Transformer):
    """With the arguments of models of language; it cuts sequences by itself."""

    def forward(self, input_ids, attention_mask=None, curriculum_seqlen=None):
        return super().forward(input_ids[:, :curriculum_seqlen])


def batch_of(step, rows=2, length=LENGTH, words=WORDS, first=0):
    """The samples ``first`` to ``first + rows`` of a step."""
    made = [torch.Generator().manual_seed(1000 * step + first + row) for row in range(rows)]
    return torch.stack([torch.randint(words, (length,), generator=one) for one in made])


def loss_of(model, batch):
    """The loss of the next word."""
    found = model(batch)
    return nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), beside(found, batch)[:, 1:].flatten())


def token_dropping(layers=(1, 2), count=LAYERS, least=4, most=LENGTH, steps=4, add=2, mask="attention_mask", **more):
    """The section ``data_efficiency`` with random-LTD."""
    section = {
        "enabled": True,
        "total_layer_num": count,
        "random_ltd_layer_id": list(layers),
        "model_mask_name": mask,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": least,
            "max_value": most,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": steps, "seq_per_step": add},
        },
        **more,
    }
    return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section}}}
