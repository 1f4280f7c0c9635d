"""A small GPT in plain PyTorch: nothing here knows that it will be trained by several processes.

The architecture of Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): pre-norm blocks,
learned positions, an output layer that shares its weight with the token embedding.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Shape:
    """10.3 million parameters: wide and shallow learns faster than narrow and deep in a few hundred steps."""

    vocab_size: int = 4096
    context: int = 128
    layers: int = 3
    heads: int = 8
    width: int = 480


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        # added to the scores: 0 where a position may look, minus infinity at what comes later
        ahead = torch.full((shape.context, shape.context), float("-inf")).triu(1)
        self.register_buffer("ahead", ahead, persistent=False)

    def forward(self, x):
        """x: [batch, time, width], any floating dtype."""
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width / heads]
        if hasattr(F, "scaled_dot_product_attention"):  # torch 2.x
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1) + self.ahead[:time, :time].to(q.dtype)
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(self._init)
        for block in self.blocks:  # keep the sum of all residual branches at unit scale
            for last in (block.attention.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * shape.layers))

    @staticmethod
    def _init(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, x, y=None):
        """x, y: int64 [batch, time]. The mean cross entropy in nats per token (a scalar, fp32), or, without ``y``,
        the logits [batch, time, vocab_size]."""
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.tokens.weight)
        if y is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    @torch.no_grad()
    def generate(self, ids, count, temperature=0.8, top_k=40, generator=None):
        """``ids`` (list of int) continued by ``count`` sampled tokens."""
        ids = list(ids)
        for _ in range(count):
            x = torch.tensor([ids[-self.shape.context :]], device=self.tokens.weight.device)
            logits = self(x)[0, -1].float() / temperature
            best = logits.topk(top_k)
            pick = torch.multinomial(best.values.softmax(-1).cpu(), 1, generator=generator)
            ids.append(int(best.indices[pick]))
        return ids


def parameter_groups(model, weight_decay):
    """Matrices decay, biases and norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
