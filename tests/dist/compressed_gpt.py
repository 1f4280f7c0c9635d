"""A small GPT that learns a text by optimizers whose ranks exchange signs, by ZeRO++, and by the plain ones beside
them."""

import os
import statistics

import torch

import deepspeed

VOCABULARY, LENGTH = 64, 32
ZEROPP = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])
        self.attention = torch.nn.MultiheadAttention(width, 4, batch_first=True)
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x, mask):
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.inner(self.norms[1](x))


class Gpt(torch.nn.Module):
    def __init__(self, width, layers=4):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.places = torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def text(seed, rows):
    """Rows in which a token follows from the one before it, with some noise."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=drawn)
    noise = torch.rand(rows, LENGTH + 1, generator=drawn) < 0.1
    for place in range(1, LENGTH + 1):
        follows = (5 * tokens[:, place - 1] + 1) % VOCABULARY
        tokens[:, place] = torch.where(noise[:, place], tokens[:, place], follows)
    return tokens


def optimizers(steps, lr):
    """The parameters of each kind of run."""
    warm = steps // 5
    adam = {"lr": lr, "weight_decay": 0.01, "betas": [0.9, 0.99], "bias_correction": True}
    lamb = {**adam, "lr": 5 * lr}
    intervals = {"var_update_scaler": 16, "local_step_scaler": steps // 4, "local_step_clipper": 4}
    zero_one = {"var_freeze_step": warm, **intervals}
    return {
        "AdamW": adam,
        "ZeRO++": adam,
        "OneBitAdam": {**adam, "freeze_step": warm},
        "OneBitAdam auto": {**adam, "freeze_step": "auto"},
        "ZeroOneAdam": {**adam, **zero_one},
        "Lamb": lamb,
        "OneBitLamb": {**lamb, "freeze_step": warm},
    }


def train(rank, world, kind, steps, seed, width):
    """``(mean loss of the last tenth, bytes sent per element and step)``."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    net, lr = Gpt(width), 1e-3
    name = "AdamW" if kind == "ZeRO++" else kind.split()[0]
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": name, "params": optimizers(steps, lr)[kind]},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": steps // 20, "warmup_max_lr": lr}},
    }
    if kind == "ZeRO++":
        os.environ["DS_HOST_ID"] = "ab"[2 * rank // world]
        config["zero_optimization"] = {"stage": 3, **ZEROPP, "zero_hpz_partition_size": world // 2}
    if "Lamb" in kind:
        config["scheduler"]["params"]["warmup_max_lr"] = 5 * lr
    engine, *_ = deepspeed.initialize(model=net, config=config)
    losses = []
    for step in range(steps):
        tokens = text(100003 * seed + world * step + rank, 8)
        logits = engine(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    numel = sum(param.numel() for param in net.parameters())
    return statistics.fmean(losses[-max(1, steps // 10) :]), engine.core.traffic()["bytes"] / numel / steps
