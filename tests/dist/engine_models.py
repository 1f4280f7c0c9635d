"""Models and data that the engine tests share, and the same trained in one plain process."""

import functools

import pytest
import torch

from models import Parts, beside
from plain import Plain
from runs import initialized, take_step


def after_embedding(net, hidden, extra):
    hidden = torch.tanh(net.first(hidden))
    if extra:
        hidden = torch.tanh(net.sometimes(hidden))
    hidden = torch.tanh(net.frozen(torch.tanh(net.tied(hidden))))
    return net.out(net.norm(hidden))


def make_net(sparse=False, seed=0):
    """Every kind of parameter: shared (``tied`` is ``first``'s weight), frozen, unused, sometimes used, sparse."""
    torch.manual_seed(seed)
    net = Parts(
        lambda net, tokens, extra=False: after_embedding(net, net.embed(beside(net.embed.weight, tokens)), extra),
        embed=torch.nn.Embedding(17, 12, sparse=sparse),
        first=torch.nn.Linear(12, 12),
        tied=torch.nn.Linear(12, 12, bias=False),
        frozen=torch.nn.Linear(12, 12),
        sometimes=torch.nn.Linear(12, 12),
        never=torch.nn.Linear(3, 3),
        norm=torch.nn.LayerNorm(12),
        out=torch.nn.Linear(12, 5),
        count=torch.arange(3.0),
    )
    net.tied.weight = net.first.weight
    net.frozen.weight.requires_grad_(False)
    return net


def batch(step, size=8):
    generator = torch.Generator().manual_seed(1000 + step)
    return tuple(torch.randint(0, kinds, (size, 6), generator=generator) for kinds in (17, 5))


def _wide(t):
    return t if t.dtype == torch.float64 else t.float()


def loss_of(output, targets):
    return torch.nn.functional.cross_entropy(_wide(output).reshape(-1, 5), beside(output, targets).reshape(-1))


def loss_on(model, step, size=8, rank=0, world=1, **more):
    """The loss of a model or an engine on a batch, or on what one of ``world`` ranks has of it."""
    tokens, targets = (part.chunk(world)[rank] for part in batch(step, size))
    return loss_of(model(tokens, **more), targets)


def uses_extra(step):
    return step % 3 != 1


def config(world=1, accumulate=1, size=8, **more):
    made = {
        "train_batch_size": size,
        "train_micro_batch_size_per_gpu": size // world // accumulate,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.05}},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 300},
    }
    made.update(more)
    return made


def net_run(world=1, stage=0, accumulate=1, model=None, seed=0, client=None, zero=(), data=None, **more):
    """Returns the result of ``initialized`` for ``make_net`` and ``config``. ``more``: arguments of ``config``."""
    made = config(world, accumulate, **{"zero_optimization": {"stage": stage, **dict(zero)}, **more})
    made = {name: value for name, value in made.items() if value is not None}
    return initialized(make_net(seed=seed) if model is None else model, made, client, training_data=data)


def net_engine(*args, **more):
    """The engine of ``net_run``."""
    return net_run(*args, **more)[0]


def saving_engine(world, stage=1, zero=(), client=None, **checkpoint):
    """A ``net_engine`` with ``checkpoint`` as the section of checkpoints."""
    return net_engine(world, stage, zero=zero, client=client, checkpoint=checkpoint)


def plain_net(steps, optimizer=None, sparse=False, size=8, **more):
    """``make_net`` after ``steps`` steps of one plain process on whole batches. ``more``: arguments of ``Plain``."""
    plain = Plain(make_net(sparse), optimizer or adam_like, **{"clip": 0.5, **more})
    return plain.run(lambda model, step, part: loss_on(model, step, size, extra=uses_extra(step)), range(steps))


def train_engine(engine, steps, rank, world, user_backward=False, start=0, size=8):
    """Mean losses over the ranks' parts and norms; each micro step takes this rank's part of the whole batch."""
    accumulate = engine.gradient_accumulation_steps()
    losses, norms = [], []
    for step in range(start, start + steps):
        tokens, targets = (t.to(engine.device) for t in batch(step, size))
        part = tokens.shape[0] // world // accumulate
        total = 0.0
        for micro in range(accumulate):
            begin = (rank * accumulate + micro) * part
            output = engine(tokens[begin : begin + part], extra=uses_extra(step))
            loss = loss_of(output, targets[begin : begin + part])
            total += take_step(engine, loss, user_backward) / accumulate
        losses.append(total)
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def after_steps(engine, steps, rank, world, **more):
    """The engine, after ``train_engine``."""
    train_engine(engine, steps, rank, world, **more)
    return engine


def step_losses(engine, batches, loss_of=lambda out: out):
    """The losses of steps on ``batches``; ``loss_of`` what the model makes of one."""
    return [take_step(engine, loss_of(engine(one))) for one in batches]


def losses_and_norms(engine, batches):
    """The losses of steps on ``batches``, which the model makes, and the norms of their gradients."""
    found = [(take_step(engine, engine(one)), float(engine.get_global_grad_norm())) for one in batches]
    return [list(one) for one in zip(*found)]


def elastic_step(engine, size=8):
    """The next step on the batch of ``size`` samples that all ranks share; returns its mean loss, to all ranks."""
    step, rank, world = engine.global_steps, engine.global_rank, engine.world_size
    micro, parts = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    tokens, targets = batch(step, size)
    mean = torch.zeros(())
    for part in range(parts):
        rows = slice((part * world + rank) * micro, (part * world + rank + 1) * micro)
        loss = loss_of(engine(tokens[rows], extra=uses_extra(step)), targets[rows])
        mean += loss.detach() / parts / world
        take_step(engine, loss)
    if world > 1:
        torch.distributed.all_reduce(mean)
    return mean


def difference(model, reference):
    """Largest relative difference of a parameter, in the 2-norm of the parameter."""
    pairs = [[p.detach().double().cpu() for p in pair] for pair in zip(model.parameters(), reference.parameters())]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)


def adam_like(params):
    """The optimizer of ``config`` as torch has it."""
    return torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)


# ---- small models on rows of six numbers ---------------------------------------------------------------------------
def six(rank, step):
    """Two rows of six numbers for a step of a rank."""
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def square_losses(engine, rank, steps):
    """Trains ``engine`` on the mean square of its output; the losses."""
    return step_losses(engine, (six(rank, step) for step in range(steps)), lambda out: out.square().mean())


def assert_like_sgd(model, sharded, steps=3, micro_steps=1):
    """``sharded``: the losses of each rank. They are those of ``model`` in one process, under SGD with rate 0.1, which
    makes a step of every ``micro_steps``."""
    plain = Plain(model, functools.partial(torch.optim.SGD, lr=0.1), dtype=None)
    for step in range(steps):
        parts = [plain.model(six(rank, step)).square().mean() for rank in range(len(sharded))]
        own = plain.add(*parts, share=1 / (len(parts) * micro_steps))
        assert [losses[step] for losses in sharded] == pytest.approx(own, abs=1e-6)
        if step % micro_steps == micro_steps - 1:
            plain.update()
