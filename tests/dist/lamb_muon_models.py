"""LAMB as it is published with FusedLamb and Muon as its paper writes it, on whole fp64 tensors, and what the tests
train with them."""

import torch

import deepspeed
from models import Parts, seeded
from plain import Plain
from runs import engine_of, settings, take_step

WIDTH, ROWS, CLIP = 6, 3, 0.5
LAMB = {"lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.05}
MUON = {"muon_lr": 0.02, "adam_lr": 0.003, "momentum": 0.9, "weight_decay": 0.05, "betas": [0.9, 0.95], "eps": 1e-8}
PARAMS = {"Lamb": LAMB, "Muon": MUON}


def orthogonalised(update, steps=5):
    """Jordan et al. 2024, the quintic iteration, in the standard form."""
    x = update.reshape(update.shape[0], -1)
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    rows, columns = x.shape
    return x.reshape(update.shape) * max(1.0, rows / columns) ** 0.5


class PlainLamb:
    """You et al. 2020, with raw moments in the direction and bias correction in the rate."""

    def __init__(self, named, lr, betas, eps, weight_decay):
        self.named, self.lr, self.betas, self.eps, self.decay = named, lr, betas, eps, weight_decay
        self.state = {}

    def moments(self, name, grad):
        state = self.state.setdefault(name, {"step": 0, "m": torch.zeros_like(grad), "v": torch.zeros_like(grad)})
        beta1, beta2 = self.betas
        state["step"] += 1
        state["m"] = beta1 * state["m"] + (1 - beta1) * grad
        state["v"] = beta2 * state["v"] + (1 - beta2) * grad * grad
        return state["m"], state["v"], 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]

    @torch.no_grad()
    def step(self):
        for name, weight in self.named.items():
            if weight.grad is not None:
                weight -= self.update(name, weight, weight.grad)

    def update(self, name, weight, grad):
        first, second, correction1, correction2 = self.moments(name, grad)
        update = first / (second.sqrt() + self.eps) + self.decay * weight
        ratio = 1.0
        if weight.norm() > 0 and update.norm() > 0:
            ratio = float((weight.norm() / update.norm()).clamp(0.01, 10.0))
        return self.lr * correction2**0.5 / correction1 * ratio * update


class PlainMuon(PlainLamb):
    """Momentum, orthogonalised, for matrices; AdamW for the rest."""

    def __init__(self, named, muon_lr, adam_lr, momentum, weight_decay, betas, eps):
        super().__init__(named, adam_lr, betas, eps, weight_decay)
        self.muon_lr, self.momentum = muon_lr, momentum

    def update(self, name, weight, grad):
        if weight.dim() < 2 or "embed" in name:
            first, second, correction1, correction2 = self.moments(name, grad)
            adam = first / correction1 / ((second / correction2).sqrt() + self.eps)
            return self.lr * (adam + self.decay * weight)
        new = self.momentum * self.state.get(name, torch.zeros_like(grad)) + (1 - self.momentum) * grad
        self.state[name] = new
        update = (1 - self.momentum) * grad + self.momentum * new
        return self.muon_lr * (orthogonalised(update) + self.decay * weight)


FORMULAS = {"Lamb": PlainLamb, "Muon": PlainMuon}


def forward_matrices(net, x, step):
    hidden = x + net.embed[step % 5]
    hidden = hidden + net.tall(torch.tanh(net.wide(hidden)))
    if step % 3 != 1:
        hidden = net.sometimes(hidden)
    hidden = torch.tanh(net.frozen(hidden)) * net.filters.sum(dim=(0, 1))
    return net.head(hidden)


def matrices():
    """Matrices of several shapes, vectors, a filter, an embedding; frozen and sometimes unused parameters."""
    return Parts(
        forward_matrices,
        embed=torch.nn.Parameter(torch.rand(5, WIDTH)),
        wide=torch.nn.Linear(WIDTH, 4 * WIDTH),
        tall=torch.nn.Linear(4 * WIDTH, WIDTH),
        frozen=torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        sometimes=torch.nn.Linear(WIDTH, WIDTH),
        filters=torch.nn.Parameter(0.3 * torch.randn(3, 2, WIDTH)),
        head=torch.nn.Linear(WIDTH, 2, bias=False),
    )


def grid():
    """Element-wise, so that it runs in fp16 on any CPU."""
    return Parts(
        lambda net, x, step: (x.unsqueeze(1) * net.weight).sum(1) + net.bias,
        weight=torch.nn.Parameter(torch.rand(5, WIDTH) - 0.2),
        bias=torch.nn.Parameter(torch.rand(WIDTH)),
    )


def make(kind=matrices):
    return seeded(kind)


def batch(step, part, out=2):
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.rand(ROWS, WIDTH, generator=generator), 1 + torch.rand(ROWS, out, generator=generator)


def loss_of(output, target):
    wide = output.double() if output.dtype == torch.float64 else output.float()
    return ((wide - target.to(wide)) ** 2).mean()


def loss_on(model, step, part, out=2):
    x, target = batch(step, part, out)
    return loss_of(model(x.to(next(model.parameters())), step), target)


def plain_of(model, kind, dtype="fp32"):
    """The plain process, with masters in fp64. 16-bit gradients are averaged as ``reduced_mean`` says."""
    names = [name for name, _ in model.named_parameters()]
    formula = lambda params: FORMULAS[kind](dict(zip(names, params)), **PARAMS[kind])
    narrow = torch.bfloat16 if dtype == "bf16" else None
    return Plain(model, formula, narrow or torch.float64, torch.float64, CLIP, rounds=narrow is not None)


def start(kind, stage, model=None, dtype="fp32", params=None, accumulate=1, **more):
    """An engine with small buckets that keeps no parameter gathered."""
    zero = {"reduce_bucket_size": 400, "allgather_bucket_size": 300, **more.pop("zero", {})}
    section = {"type": kind, "params": params or PARAMS.get(kind, {})}
    if dtype != "fp32":
        more[dtype] = {"enabled": True, **more.get(dtype, {})}
    deepspeed.log.logger.setLevel("WARNING")
    made = settings(stage, ROWS, accumulate, optimizer=section, zero=zero, **{"gradient_clipping": CLIP, **more})
    return engine_of(make() if model is None else model, made)


def train(engine, steps, rank, world, first=0, out=2):
    """``steps`` optimizer steps; part ``rank + world * k`` is micro-batch k of a rank."""
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            take_step(engine, loss_on(engine, step, rank + world * micro, out))
    return engine


def worst_gap(found, expected):
    """Worst relative difference of a parameter in the 2-norm."""
    gaps = [(found[n].double() - p.double()).norm() / p.double().norm() for n, p in expected.items()]
    return float(max(gaps))
