"""Attention in one process, and what ranks that share a sequence compare with it."""

import functools

import torch

from deepspeed import comm as dist
from deepspeed.log import logger
from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from models import Parts
from plain import Plain
from runs import engine_of, settings


def attend(query, key, value, mask=None, batch_dim=0, scale=None, dropped=None):
    """Plain attention over ``[batch, sequence, heads, size]`` (batch_dim 0) or ``[sequence, batch, ...]``; key/value
    heads are repeated evenly. ``mask``: added to the scores, or "causal". ``dropped``: see ``ops.attention.blocks``."""
    if batch_dim == 1:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    repeats = query.shape[2] // max(key.shape[2], 1)
    key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * (scale or query.shape[-1] ** -0.5)
    if isinstance(mask, str):
        length = query.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1).to(query)
    scores = scores if mask is None else scores + mask
    used = scores.softmax(-1)
    used = used if dropped is None else used * dropped.mask(used[:, :, None], (0, 0))[:, :, 0]
    out = torch.einsum("bhqk,bkhd->bqhd", used, value)
    return out if batch_dim == 0 else out.transpose(0, 1)


def projections(heads, kv, size=4, length=12, batch=2, batch_dim=0, dtype=torch.float64, seed=0):
    """Query, key and value of a whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def one(count):
        shape = (batch, length) if batch_dim == 0 else (length, batch)
        return torch.randn(*shape, count, size, generator=generator, dtype=torch.float64).to(dtype)

    return one(heads), one(kv), one(kv)


def part(tensor, rank, world, dim):
    """A leaf with this rank's part of ``tensor`` along ``dim``."""
    return tensor.detach().chunk(world, dim)[rank].clone().requires_grad_(tensor.is_floating_point())


def of_cases(rank, world, find, cases):
    """The results of a function of ranks, one for each case."""
    return [find(rank, world, *case) for case in cases]


def worst(pairs):
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)


VOCAB, WIDTH, LENGTH = 13, 8, 8
SIZE = WIDTH // 4  # of a head


def forward_tiny(net, tokens, places):
    x = net.tokens(tokens) + net.places(places)
    query, (key, value) = net.query(x), net.keys(x).chunk(2, -1)
    heads = (y.unflatten(-1, (y.shape[-1] // SIZE, SIZE)) for y in (query, key, value))
    x = x + net.back(net.attention(*heads).flatten(2))
    return net.head(x + torch.tanh(net.mlp(x)))


def tiny(heads=4, kv=2, attention=None):
    """A causal transformer of one layer. ``attention``: called with query, key, value of ``[batch, sequence, heads,
    size]``."""
    torch.manual_seed(5)
    return Parts(
        forward_tiny,
        attention=attention or (lambda q, k, v: attend(q, k, v, "causal")),
        tokens=torch.nn.Embedding(VOCAB, WIDTH),
        places=torch.nn.Embedding(LENGTH, WIDTH),
        query=torch.nn.Linear(WIDTH, heads * SIZE),
        keys=torch.nn.Linear(WIDTH, 2 * kv * SIZE),
        back=torch.nn.Linear(heads * SIZE, WIDTH),
        mlp=torch.nn.Linear(WIDTH, WIDTH),
        head=torch.nn.Linear(WIDTH, VOCAB, bias=False),
    )


def batch_of(step, replica, rows=2):
    """Tokens, positions and labels (-100: none), shifted: unevenly spread, and none in the second half of replica 1."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    labels[torch.rand(rows, LENGTH, generator=generator) < 0.3] = -100
    labels[0, 0] = 3
    if replica == 1:
        labels[:, LENGTH // 2 :] = -100
    return tokens, torch.arange(LENGTH).expand(rows, LENGTH), labels


def mean_loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def vocab_loss(logits, labels, group):
    """The mean loss of a whole sequence, of its parts on the ranks of ``group``."""
    every = [torch.empty_like(labels) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, labels.contiguous(), group=group)
    losses = vocab_sequence_parallel_cross_entropy(
        logits.transpose(0, 1).contiguous(), labels.t().clamp(min=0).contiguous(), group
    )
    return losses[torch.cat(every, 1).t() != -100].mean()


def sgd_engine(model, stage, rate, accumulate=1, mpu=None, level="WARNING", **more):
    """An engine that trains ``model`` with torch's SGD and says little."""
    logger.setLevel(level)
    made = settings(stage, 2, accumulate, optimizer=None, gradient_clipping=0.0, **more)
    return engine_of(model, made, torch.optim.SGD(model.parameters(), lr=rate), mpu=mpu)


def plain_sgd(model, rate, loss_at, steps, parts=1):
    """``model`` after steps of one plain process on the mean of ``loss_at(model, step, part)`` over parts."""
    return Plain(model, functools.partial(torch.optim.SGD, lr=rate), dtype=None).run(loss_at, range(steps), parts)
