"""One small model that is trained by an engine and, next to it, by one plain fp64 process."""

import torch

import deepspeed
from plain import Plain
from runs import engine_of, settings, take_step, weights
from zero_models import BETAS, CLIP, DECAY, LR, adamw, relative

WIDTH, ROWS = 6, 3
STAGES = [0, 1, 2, 3]
ADAMW = {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "weight_decay": DECAY}}


class Deep(torch.nn.Module):
    """Linear layers; ``extra`` belongs to the model itself."""

    def __init__(self, depth=4):
        super().__init__()
        self.extra = torch.nn.Parameter(torch.rand(2, WIDTH))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = torch.nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x, layers=None):
        hidden = x * self.extra[0]
        for index in range(len(self.layers)) if layers is None else layers:
            hidden = torch.tanh(self.layers[index](hidden))
        return self.head(hidden + self.extra[1])


def batch(step, part):
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.rand(ROWS, WIDTH, generator=generator), 1 + torch.rand(ROWS, 2, generator=generator)


def loss_of(output, target):
    return ((output - target.to(output)) ** 2).mean()


def loss_on(model, step, part, *given, **named):
    """The loss of a model or an engine, in its type, on a part of a batch."""
    x, target = batch(step, part)
    return loss_of(model(x.to(next(model.parameters())), *given, **named), target)


def start(model, stage, world, accumulate=1, client=None, mpu=None, **more):
    """An engine with small buckets that keeps no parameter gathered."""
    zero = {"reduce_bucket_size": 300, "allgather_bucket_size": 200, **more.pop("zero", {})}
    more = {"optimizer": ADAMW, "gradient_clipping": CLIP, **more}
    deepspeed.log.logger.setLevel("WARNING")
    return engine_of(model, settings(stage, ROWS, accumulate, zero=zero, **more), client, mpu=mpu)


def plain_of(model):
    """The plain process, in fp64."""
    return Plain(model, adamw, clip=CLIP)


def gap(model, reference):
    """Worst relative difference of a parameter, and of the last gradient norm, to the reference's; every rank calls it.

    The norm shows what Adam hides: gradients that are all too large or too small by one factor.
    """
    norms = 0.0
    if isinstance(model, deepspeed.DeepSpeedEngine):
        norms = abs(model.get_global_grad_norm() - reference.norms[-1]) / reference.norms[-1]
        model, reference = model.module, reference.model
    found = weights(model)
    return max(norms, *(relative(found[name], param) for name, param in reference.named_parameters()))


def below(found, bound=1e-6):
    """The difference, or all differences of a dict, are below the bound."""
    for name, value in (found if isinstance(found, dict) else {"": found}).items():
        assert value < bound, f"{name} differs by {value:.2g}"


def beside(model, stage, world, accumulate=1, **more):
    """An engine on ``model``, and the plain process."""
    reference = plain_of(model)
    return start(model, stage, world, accumulate, **more), reference


def train_beside(engine, reference, rank, world, steps=range(4), given=lambda step, part: ()):
    """Trains both on the same batches: the engine on that of its rank, the reference on all of them. ``given``: more
    arguments of the model for a part of a batch."""
    for step in steps:
        take_step(engine, loss_on(engine, step, rank, *given(step, rank)))
        reference.run(lambda model, *at: loss_on(model, *at, *given(*at)), [step], world)
