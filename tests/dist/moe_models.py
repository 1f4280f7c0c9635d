"""A model with a mixture of experts, and the same as plain loops over tokens and experts in one process."""

import functools
import math

import torch

from deepspeed.moe.layer import MoE
from models import Parts, beside
from plain import Plain

WIDTH = 6
ADAM = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}
adam = functools.partial(torch.optim.AdamW, **ADAM)


def values(seed, *shape):
    return (torch.sin(torch.arange(math.prod(shape), dtype=torch.float32) * 0.7 + seed) * 0.5).reshape(shape)


def batch(step, rank, tokens=8):
    """Tokens whose first number is 1, so that the gate can prefer experts."""
    x = values(100 * step + 7 * rank, tokens, WIDTH)
    x[:, 0] = 1.0
    return x


def expert():
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 9), torch.nn.Tanh(), torch.nn.Linear(9, WIDTH))


def gate_weights(num_experts):
    """Expert 0 is chosen often, the last one never."""
    weight = values(3, num_experts, WIDTH) * 2
    weight[0, 0] += 1.0
    if num_experts > 4:
        weight[-1, 0] = -100.0
    return weight


def fill(module, seed):
    with torch.no_grad():
        for number, param in enumerate(module.parameters()):
            param.copy_(values(seed + 11 * number, *param.shape))


class Loops(torch.nn.Module):
    """A layer with experts as loops. ``forward`` returns what MoE returns, for the tokens of one rank."""

    def __init__(self, num_experts, k, drop, residual, factor):
        super().__init__()
        self.k, self.drop, self.factor = k, drop, factor
        self.wg = torch.nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = torch.nn.ModuleList([expert() for _ in range(num_experts)])
        self.mlp, self.coefficient = (expert(), torch.nn.Linear(WIDTH, 2)) if residual else (None, None)

    def forward(self, x):
        tokens, experts = len(x), len(self.experts)
        probs = torch.softmax(self.wg(x), 1)
        chosen = probs.sort(dim=1, descending=True, stable=True)[1][:, : self.k]
        counts = torch.bincount(chosen.reshape(-1), minlength=experts)
        counted = torch.bincount(chosen[:, 0], minlength=experts) if self.k == 2 else counts
        share = counted.float() / tokens / (self.k if self.k > 2 else 1)
        aux = (probs.mean(0) * share).sum() * experts
        capacity = max(math.ceil(tokens / experts * self.factor * self.k), 1) if self.drop else tokens * self.k
        out = []
        kept = [[] for _ in range(experts)]  # tokens
        for e in range(experts):
            wants = [(j, t) for j in range(self.k) for t in range(tokens) if chosen[t, j] == e]
            if self.k > 2:
                wants.sort(key=lambda one: -float(probs[one[1], e]))
            kept[e] = [t for _, t in wants[:capacity]]
        for t in range(tokens):
            mine = [e for e in range(experts) if t in kept[e]]
            whole = sum(probs[t, e] for e in mine) if self.k > 1 else 1.0
            out.append(sum((probs[t, e] / whole * self.experts[e](x[t]) for e in mine), torch.zeros(WIDTH)))
        out = torch.stack(out)
        if self.mlp is not None:
            mix = torch.softmax(self.coefficient(x), 1)
            out = out * mix[:, :1] + self.mlp(x) * mix[:, 1:]
        return out, aux, counts


def forward_net(net, x):
    x = beside(next(net.first.parameters()), x)
    hidden = x + 0.1 * torch.tanh(net.first(x))
    out, aux, net.counts = net.layer(hidden)
    return net.last(hidden + out).square().mean() + 0.05 * aux


def net_of(layer):
    return Parts(
        forward_net,
        first=torch.nn.Linear(WIDTH, WIDTH),
        layer=layer,
        last=torch.nn.Linear(WIDTH, 1),
    )


def plain_net(num_experts, k, drop, residual, factor=0.5):
    net = net_of(Loops(num_experts, k, drop, residual, factor))
    fill_net(net, net.layer.wg, dict(enumerate(net.layer.experts)), net.layer.mlp, net.layer.coefficient)
    return net


def moe_layer(num_experts, ep_size, k, drop, residual, factor=0.5, **more):
    return MoE(
        WIDTH, expert(), num_experts, ep_size, k, factor, factor, 1, residual, drop_tokens=drop, use_rts=False,
        top2_2nd_expert_sampling=False, **more,
    )  # fmt: skip


def moe_net(ep_rank, *args, **more):
    net = net_of(moe_layer(*args, **more))
    moe = net.layer.deepspeed_moe
    first = ep_rank * net.layer.num_local_experts
    experts = {first + i: one for i, one in enumerate(moe.experts.deepspeed_experts)}
    residual = (net.layer.mlp, net.layer.coefficient) if net.layer.use_residual else (None, None)
    fill_net(net, moe.gate.wg, experts, *residual)
    return net


def fill_net(net, wg, experts, mlp, coefficient):
    fill(net.first, 1)
    fill(net.last, 2)
    with torch.no_grad():
        wg.weight.copy_(gate_weights(wg.out_features))
    for number, one in experts.items():
        fill(one, 1000 * (number + 1))
    if mlp is not None:
        fill(mlp, 500)
        fill(coefficient, 600)


def plain_name(name, first):
    """The name by which ``Loops`` calls a parameter of ``MoE`` on the rank whose first expert is ``first``."""
    name = name.replace("deepspeed_moe.gate.", "").replace("deepspeed_moe.experts.deepspeed_experts", "experts")
    parts = name.split(".")
    if "experts" in parts:
        at = parts.index("experts") + 1
        parts[at] = str(first + int(parts[at]))
    return ".".join(parts)


def plain_run(net, world, steps, optimizer=adam, clip=0.3):
    """``net``, after steps of one process that has all ranks' batches. An expert without tokens has a zero gradient."""
    plain = Plain(net, optimizer, dtype=None, clip=clip, zeros=True)
    return plain.run(lambda model, step, rank: model(batch(step, rank)), range(steps), world)
