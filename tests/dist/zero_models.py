"""Small models with one trap each.

Layers are element-wise, so that every model also runs in fp16 on a CPU whose torch has no fp16 matrix product.
"""

import torch
from torch.utils.checkpoint import checkpoint

import deepspeed
from models import beside, seeded

WIDTH = 8
CLIP = 0.5
BETAS, LR, DECAY = (0.9, 0.95), 3e-3, 0.05


class Mix(torch.nn.Module):
    """``bend(weight * x + shift * roll(x) + bias)``: every output depends on two inputs. Bounded and smooth."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight = torch.nn.Parameter(0.5 * torch.rand(width) + 0.5)
        self.shift = torch.nn.Parameter(0.4 * torch.rand(width) - 0.2)
        self.bias = torch.nn.Parameter(0.2 * torch.rand(width))

    def forward(self, x):
        y = self.weight * x + self.shift * x.roll(1, -1) + self.bias
        return y / (1 + y * y)


class Case(torch.nn.Module):
    """``forward(x, step, part)`` returns the outputs, each of which has a loss and a backward of its own.

    ``part`` numbers the micro-batches of a step over all ranks. ``recompute``: checkpoints as the case says; the plain
    process goes without.
    """

    recompute = True

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = Mix(), Mix(), Mix()

    def forward(self, x, step, part):
        return (self.last(self.middle(self.first(x))),)


class Tied(Case):
    def __init__(self):
        super().__init__()
        self.last.weight = self.first.weight
        self.middle.shift = self.first.shift


class Thrice(Case):
    def forward(self, x, step, part):
        return (self.last(self.middle(self.middle(self.middle(self.first(x))))),)


class Reentrant(Case):
    """A checkpointed module that is used twice fires its gradients twice in one backward."""

    def run(self, module, x):
        return checkpoint(module, x, use_reentrant=True) if self.recompute else module(x)

    def forward(self, x, step, part):
        hidden = self.run(self.middle, self.first(x))
        return (self.last(self.run(self.middle, hidden)),)


class NonReentrant(Reentrant):
    def run(self, module, x):
        return checkpoint(module, x, use_reentrant=False) if self.recompute else module(x)


class Ours(Reentrant):
    """``deepspeed.checkpointing``."""

    def run(self, module, x):
        return deepspeed.checkpointing.checkpoint(module, x) if self.recompute else module(x)


class Unused(Case):
    """Parameters that are never used, in some steps only, in some micro-batches (so on some ranks) only."""

    def __init__(self):
        super().__init__()
        self.never, self.some_steps, self.some_parts = Mix(3), Mix(), Mix()

    def forward(self, x, step, part):
        hidden = self.first(x)
        if step % 3 != 1:
            hidden = self.some_steps(hidden)
        if (part + step) % 2 == 0:
            hidden = self.some_parts(hidden)
        return (self.last(self.middle(hidden)),)


class Frozen(Case):
    def __init__(self):
        super().__init__()
        self.middle.weight.requires_grad_(False)
        self.first.bias.requires_grad_(False)


class TwoLosses(Case):
    """Two backwards over one trunk before one step; the second head's loss does not reach all of it."""

    def __init__(self):
        super().__init__()
        self.other = Mix()

    def forward(self, x, step, part):
        trunk = self.first(x)
        return self.last(self.middle(trunk)), self.other(trunk)


class Odd(Case):
    """Sizes that no number of ranks divides: 7, 13 x 3, 1, none at all."""

    def __init__(self):
        super().__init__()
        self.seven = torch.nn.Parameter(torch.rand(7))
        self.table = torch.nn.Parameter(torch.rand(13, 3))
        self.turned = torch.nn.Parameter(torch.rand(3, 5).t())
        self.scalar = torch.nn.Parameter(torch.rand(()))
        self.one = torch.nn.Parameter(torch.rand(1))
        self.none = torch.nn.Parameter(torch.rand(0))
        self.empty = torch.nn.Parameter(torch.rand(3, 0, 2))

    def forward(self, x, step, part):
        hidden = self.last(self.middle(self.first(x))) * self.scalar + self.one
        hidden = hidden + torch.nn.functional.pad(self.seven, (0, 1)) + self.none.sum() + self.empty.sum()
        return (hidden + torch.nn.functional.pad(self.table[step % 13] + self.turned[part % 5], (0, 5)),)


class Cast(torch.nn.Module):
    """Runs ``module`` in its own dtype."""

    def __init__(self, module, dtype):
        super().__init__()
        self.module = module.to(dtype)

    def forward(self, x):
        return self.module(x.to(self.module.weight.dtype)).to(x.dtype)


class Dtypes(Case):
    """bf16, fp32 and fp64 parameters (an engine in bf16 or fp16 casts all of them)."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = Cast(Mix(), torch.bfloat16), Cast(Mix(), torch.float64)

    def forward(self, x, step, part):
        return (self.last(self.wide(self.middle(self.narrow(self.first(x))))),)


MODELS = {
    "plain": Case,
    "tied": Tied,
    "module used 3 times": Thrice,
    "re-entrant checkpoint": Reentrant,
    "non-re-entrant checkpoint": NonReentrant,
    "deepspeed checkpoint": Ours,
    "unused": Unused,
    "frozen": Frozen,
    "two losses": TwoLosses,
    "odd and empty sizes": Odd,
    "several dtypes": Dtypes,
}


def make(name, seed=0):
    return seeded(MODELS[name], seed=seed)


def data(step, part, rows=2):
    """Inputs and targets of one micro-batch, fp32: such that a gradient is no small difference of large terms."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    return 0.2 + 0.6 * torch.rand(rows, WIDTH, generator=generator), 1 + torch.rand(rows, WIDTH, generator=generator)


def loss_of(output, target):
    """In fp32 at least."""
    return ((output.to(torch.promote_types(output.dtype, torch.float32)) - target) ** 2).mean()


def outputs_of(model, step, part):
    """``[loss]`` of a micro-batch, of a model or an engine in its type."""
    first = next(model.parameters())
    x, target = (beside(first, one) for one in data(step, part))
    return [loss_of(output, target) for output in model(x.to(first.dtype), step, part)]


def adamw(params):
    """The optimizer of ``engine_config`` as torch has it."""
    return torch.optim.AdamW(params, lr=LR, betas=BETAS, weight_decay=DECAY)


def engine_config(stage, world, accumulate, dtype="fp32", **more):
    """Buckets of a few parameters; biases stay gathered at stage 3, weights come and go."""
    made = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "train_batch_size": 2 * world * accumulate,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "weight_decay": DECAY}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 400,
            "allgather_bucket_size": 300,
            "stage3_param_persistence_threshold": 4,
            **more.pop("zero", {}),
        },
    }
    if dtype != "fp32":
        made[dtype] = {"enabled": True}
    if dtype == "fp16":
        made["fp16"].update(initial_scale_power=7, loss_scale_window=1000)
    made.update(more)
    return made


def relative(found, expected):
    """Difference in the 2-norm, relative to ``expected``."""
    expected = expected.detach().cpu().double()
    return float((found.detach().cpu().double() - expected).norm() / expected.norm().clamp_min(1e-9))
