"""Programs that tests train: a model, data with losses, an optimizer and a number of steps, a row each.

``claims.equals_plain`` trains a program with an engine in any case (``cases.py``) and with one plain process.
"""

import functools
import random
from typing import Callable, NamedTuple

import numpy
import torch

import engine_models
import frozen_models
import lamb_muon_models
import tensor_models
import zero_models
import zero_training
from deepspeed.ops.adagrad import FusedAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.sgd import FusedSGD
from models import Recomputed, samples, seeded
from runs import SMALL_PARTS, sgd
from test_lion import lion
from zero_training import ADAMW


class Bounds(NamedTuple):
    """The largest relative differences to the plain process: of a gradient, of a parameter after the last step, of the
    norm of the gradients, of a loss, the mean over ranks, and of a state of the optimizer after the last step."""

    grad: float
    master: float
    norm: float
    loss: float
    state: float = 0.0


# 16 bits: the plain process rounds the same products. What is left are gradients of a parameter that is used several
# times, which autograd adds up in 16 bits where we may add in 32, and weights on the edge between two 16-bit values.
BOUNDS = {
    "fp32": Bounds(1e-6, 1e-6, 1e-6, 1e-6),
    "bf16": Bounds(0.03, 3e-3, 0.03, 0.03),
    "fp16": Bounds(0.004, 1e-3, 0.004, 0.004),
}


# None: twice the differences that one plain process in that type has to one in fp64.
LANGUAGE = {"fp32": Bounds(2e-5, 2e-5, 1e-5, 1e-5), "bf16": None}


class Program(NamedTuple):
    make: Callable  # the model
    losses: Callable  # of (model or engine, step, part): those of a micro-batch; parts are numbered over all ranks
    optimizer: object = ADAMW  # a section of the configuration, or a function of the parameters
    plain: Callable = zero_models.adamw  # the same for the plain process, a function of the parameters
    rows: int = 2  # of a micro-batch
    steps: int = 10
    clip: float = zero_models.CLIP
    states: dict = {}  # names of the optimizer's states, and what the plain one calls them
    config: dict = {}  # more keys
    zero: dict = {}  # more keys of the section of ZeRO
    bounds: dict = BOUNDS
    keeps_types: bool = False  # parameters of several types: an engine in fp32 leaves them as they are
    schedule: Callable = None  # a function of the optimizer
    data: list = None  # samples for a loader of the engine: then losses get its batches in place of numbers of parts


class Formula:
    """A plain optimizer from ``formula(weight, grad, state, step)``."""

    def __init__(self, params, formula):
        self.params, self.formula, self.state, self.steps = list(params), formula, {}, 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for p in self.params:
            p.copy_(self.formula(p, p.grad, self.state.setdefault(p, {}), self.steps))


def of_model(name):
    program = Program(functools.partial(zero_models.make, name), zero_models.outputs_of)
    if name == "several dtypes":  # our own Adam refuses fp64
        more = {"optimizer": zero_models.adamw, "keeps_types": True, "bounds": {**BOUNDS, "fp32": BOUNDS["bf16"]}}
        program = program._replace(**more)
    return program


def of_language_model(name, tied=False):
    """A model of ``tensor_models``, whose next tokens are learned. Gradients of biases of keys are zero but for
    rounding, and Adam would divide them by themselves."""
    sgd = section("SGD", lr=0.1, momentum=0.9), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = sgd if name in ("gpt2", "bloom") else (ADAMW, zero_models.adamw)
    make = functools.partial(tensor_models.model_of, name, tied)
    return Program(make, functools.partial(token_loss, name), *optimizer, clip=0.5, bounds=LANGUAGE)


def token_loss(name, model, step, part):
    tokens = tensor_models.tokens_of(seed=100 * step + part)
    logits, wanted = tensor_models.logits_of(model, tokens, name), tokens[:, :4] if name == "t5" else tokens
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted[:, 1:].flatten())


def net_losses(model, step, part):
    tokens, targets = engine_models.batch(100 * step + part, 2)
    return engine_models.loss_of(model(tokens, extra=engine_models.uses_extra(step)), targets)


def drawn_losses(model, step, batch):
    """With everything that a run draws from: the order of data, dropout, Python's and numpy's numbers."""
    tokens, targets = batch
    output = torch.nn.functional.dropout(model(tokens, extra=random.random() < 0.5), 0.1)
    return engine_models.loss_of(output, targets) * float(1 + 0.1 * numpy.random.rand())


def of_optimizer(optimizer, plain, **states):
    """``optimizer``: a section of the configuration, or a function of the parameters."""
    bounds = {"fp32": Bounds(1e-5, 2e-6, 1e-5, 1e-5, 2e-6), "bf16": Bounds(0.05, 2e-2, 0.03, 0.03, 2e-2)}
    config = {"communication_data_type": "fp32", "zero_allow_untested_optimizer": False}
    make = functools.partial(seeded, zero_training.Deep)
    return Program(make, zero_training.loss_on, optimizer, plain, 3, 6, states=states, config=config, bounds=bounds)


RECOMPUTED = {"re-entrant": True, "non-re-entrant": False, "kept": None}


def of_frozen(make, how):
    """Layers of which most are frozen, recomputed in backward. Gradients of all steps are compared."""
    frozen = make is frozen_models.frozen_layers
    bounds = {"fp32": Bounds(4e-6, 1e-6, 1e-6, 1e-6)}
    made = functools.partial(Recomputed, make, 2 if frozen else 3, RECOMPUTED[how])
    if frozen:
        sgd = section("SGD", lr=0.1), functools.partial(torch.optim.SGD, lr=0.1)
        return Program(made, frozen_models.loss_of_frozen, *sgd, 1, 2, 0.0, bounds=bounds)
    adamw = section("AdamW", lr=0.01), functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)
    return Program(made, frozen_models.loss_of_adapted, *adamw, 2, 3, 0.0, bounds=bounds)


def of_formula(kind):
    """LAMB or Muon, for engines only: lamb_muon_models.py has its plain processes."""
    optimizer = section(kind, **lamb_muon_models.PARAMS[kind])
    return Program(lamb_muon_models.make, lamb_muon_models.loss_on, optimizer, None, lamb_muon_models.ROWS)


def section(kind, **params):
    return {"type": kind, "params": params}


def two_groups(params, make):
    trained = [p for p in params if p.requires_grad]
    decay, rest = ([p for p in trained if (p.ndim > 1) == many] for many in (True, False))
    return make([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}])


partial, optim = functools.partial, torch.optim
NET = Program(
    engine_models.make_net, net_losses, engine_models.config()["optimizer"], engine_models.adam_like, steps=50,
    bounds={"fp32": Bounds(1e-5, 1e-6, 1e-5, 1e-6, 2e-5)},
    zero={"reduce_bucket_size": 300, "allgather_bucket_size": 200, "stage3_param_persistence_threshold": 20},
)  # fmt: skip
ADAM = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
OPTIMIZERS = {
    "FusedAdam, L2": of_optimizer(
        partial(FusedAdam, lr=3e-3, adam_w_mode=False, weight_decay=0.05),
        partial(optim.Adam, lr=3e-3, weight_decay=0.05), **ADAM,
    ),
    "Adam of the config": of_optimizer(
        section("Adam", lr=3e-3, weight_decay=0.05, fp32_optimizer_states=False),
        partial(optim.AdamW, lr=3e-3, weight_decay=0.05), **ADAM,
    ),
    "DeepSpeedCPUAdam": of_optimizer(
        partial(DeepSpeedCPUAdam, lr=3e-3, weight_decay=0.05), partial(optim.AdamW, lr=3e-3, weight_decay=0.05), **ADAM
    ),
    "Adagrad of the config": of_optimizer(
        section("Adagrad", lr=0.01, weight_decay=0.05, fp32_optimizer_states=False),
        partial(optim.Adagrad, lr=0.01, weight_decay=0.05), exp_avg_sq="sum",
    ),
    "FusedAdagrad": of_optimizer(
        partial(FusedAdagrad, lr=0.02, eps=1e-6), partial(optim.Adagrad, lr=0.02, eps=1e-6), exp_avg_sq="sum"
    ),
    "FusedSGD": of_optimizer(
        partial(FusedSGD, lr=0.05, momentum=0.9, weight_decay=0.05, nesterov=True),
        partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.05, nesterov=True), momentum_buffer="momentum_buffer",
    ),
    "Lion of the config": of_optimizer(
        section("Lion", lr=1e-3, betas=[0.9, 0.99], weight_decay=0.05),
        partial(Formula, formula=lion(1e-3, (0.9, 0.99), 0.05)), exp_avg="m",
    ),
    "DeepSpeedCPULion": of_optimizer(
        partial(DeepSpeedCPULion, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.05),
        partial(Formula, formula=lion(1e-3, (0.9, 0.99), 0.05)), exp_avg="m",
    ),
    "FusedLion": of_optimizer(
        partial(FusedLion, lr=1e-3, betas=(0.9, 0.99)), partial(Formula, formula=lion(1e-3, (0.9, 0.99), 0.0)),
        exp_avg="m",
    ),
}  # fmt: skip
# Optimizers of torch's that the script makes, on the net.
CLIENTS = {
    "sgd": partial(optim.SGD, lr=0.05, momentum=0.9),
    "adagrad": partial(optim.Adagrad, lr=0.01),
    "adam": partial(optim.Adam, lr=3e-3),
}
HALVED = partial(optim.lr_scheduler.StepLR, step_size=10, gamma=0.5)
MODELS = {name: of_model(name) for name in zero_models.MODELS}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}
TOKENS = samples(22, lambda draws: tuple(torch.randint(0, kinds, (6,), generator=draws) for kinds in (17, 5)))
SPARSE = NET._replace(make=partial(engine_models.make_net, sparse=True))
DRAWN = NET._replace(losses=drawn_losses, data=TOKENS, config={"scheduler": WARMUP}, zero=SMALL_PARTS)
LANGUAGE_MODELS = {name: of_language_model(name) for name in tensor_models.MODELS}
LANGUAGE_MODELS.update({f"{name}, tied": of_language_model(name, True) for name in ("llama", "gpt2")})
PROGRAMS = {
    **MODELS,
    **LANGUAGE_MODELS,
    **OPTIMIZERS,
    "net": NET,
    "net, 10 steps": NET._replace(steps=10),
    "drawn net": DRAWN,
    "drawn net, SGD of torch": DRAWN._replace(optimizer=sgd),
    **{f"frozen layers, {how}": of_frozen(frozen_models.frozen_layers, how) for how in RECOMPUTED},
    **{f"adapters, {how}": of_frozen(frozen_models.adapted, how) for how in ("re-entrant", "non-re-entrant")},
    "Lamb": of_formula("Lamb"),
    "Muon": of_formula("Muon"),
    "sparse net": SPARSE,
    "sparse net, 10 steps": SPARSE._replace(steps=10),
    "groups": NET._replace(
        optimizer=partial(two_groups, make=partial(FusedAdam, lr=3e-3, betas=(0.9, 0.95))),
        plain=partial(two_groups, make=partial(optim.AdamW, lr=3e-3, betas=(0.9, 0.95))),
        states=ADAM,
    ),
    "SGD by name": NET._replace(optimizer=section("SGD", lr=0.05, momentum=0.9), plain=CLIENTS["sgd"]),
    **{name: NET._replace(optimizer=client, plain=client, schedule=HALVED) for name, client in CLIENTS.items()},
}
