"""GPT-2, whose attention and MLPs are split over the model-parallel ranks."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import gpt2_mpu as mpu

STD = 0.02


class Attention(nn.Module):
    """Each rank has some heads. The outputs of ``qkv`` are ordered by head: query, key and value of head 0 first."""

    def __init__(self, args):
        super().__init__()
        width, self.dropout = args.hidden_size, nn.Dropout(args.dropout)
        self.head = width // args.num_attention_heads
        self.qkv = mpu.ColumnParallelLinear(width, 3 * width, STD)
        self.out = mpu.RowParallelLinear(width, width, STD / math.sqrt(2 * args.num_layers))

    def forward(self, x):
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, -1, 3, self.head).permute(3, 0, 2, 1, 4)
        scores = (q / math.sqrt(self.head)) @ k.transpose(-2, -1)
        later = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.float().masked_fill(later, float("-inf")).softmax(-1).to(x.dtype)
        with mpu.get_cuda_rng_tracker().fork():  # each rank has other heads
            weights = self.dropout(weights)
        return self.dropout(self.out((weights @ v).transpose(1, 2).reshape(batch, time, -1)))


class Layer(nn.Module):
    def __init__(self, args):
        super().__init__()
        width, self.dropout = args.hidden_size, nn.Dropout(args.dropout)
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(args), nn.LayerNorm(width)
        self.up = mpu.ColumnParallelLinear(width, 4 * width, STD)
        self.down = mpu.RowParallelLinear(4 * width, width, STD / math.sqrt(2 * args.num_layers))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT2(nn.Module):
    """The mean cross entropy of the next bytes. Its output layer shares the weight of the table of tokens."""

    def __init__(self, args):
        super().__init__()
        self.checkpoint_activations = args.checkpoint_activations
        self.tokens = nn.Embedding(256, args.hidden_size)
        self.positions = nn.Embedding(args.seq_length, args.hidden_size)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=STD)
        self.dropout, self.norm = nn.Dropout(args.dropout), nn.LayerNorm(args.hidden_size)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.num_layers))

    def forward(self, tokens, labels):
        x = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = mpu.checkpoint(layer, x) if self.checkpoint_activations else layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def groups_of(model):
    """Two groups of parameters: matrices have weight decay, biases and norms do not."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.01},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0},
    ]
