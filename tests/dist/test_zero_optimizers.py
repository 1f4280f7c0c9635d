"""Every native optimizer inside ZeRO: stages 0 to 3, fp32 and bf16, on two ranks, against one plain process in fp64."""

import copy

import pytest
import torch

from deepspeed.ops.adagrad import FusedAdagrad
from deepspeed.ops.adam import Adam8bit, DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.sgd import FusedSGD
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from harness import on_ranks
from models import seeded
from refusals import refused
from runs import load_into, take_step, weights
from test_lion import lion
from zero_models import clip, relative
from zero_training import Deep, loss_on, start

pytestmark = pytest.mark.any_device
STEPS = 6


class Formula:
    """A plain optimizer from ``formula(weight, grad, state, step)``."""

    def __init__(self, params, formula):
        self.params, self.formula, self.states, self.steps = list(params), formula, {}, 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for p in self.params:
            p.copy_(self.formula(p, p.grad, self.states.setdefault(p, {}), self.steps))


# name -> (what initialize gets as the optimizer, or the config's section; the plain one; names of its states)
CASES = {
    "FusedAdam, L2": (
        lambda params: FusedAdam(params, lr=3e-3, adam_w_mode=False, weight_decay=0.05),
        lambda params: torch.optim.Adam(params, lr=3e-3, weight_decay=0.05),
        ["exp_avg", "exp_avg_sq"],
    ),
    "Adam of the config": (
        {"type": "Adam", "params": {"lr": 3e-3, "weight_decay": 0.05, "fp32_optimizer_states": False}},
        lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.05),
        ["exp_avg", "exp_avg_sq"],
    ),
    "DeepSpeedCPUAdam": (
        lambda params: DeepSpeedCPUAdam(params, lr=3e-3, weight_decay=0.05),
        lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.05),
        ["exp_avg", "exp_avg_sq"],
    ),
    "Adagrad of the config": (
        {"type": "Adagrad", "params": {"lr": 0.01, "weight_decay": 0.05, "fp32_optimizer_states": False}},
        lambda params: torch.optim.Adagrad(params, lr=0.01, weight_decay=0.05),
        ["exp_avg_sq"],
    ),
    "FusedAdagrad": (
        lambda params: FusedAdagrad(params, lr=0.02, eps=1e-6),
        lambda params: torch.optim.Adagrad(params, lr=0.02, eps=1e-6),
        ["exp_avg_sq"],
    ),
    "FusedSGD": (
        lambda params: FusedSGD(params, lr=0.05, momentum=0.9, weight_decay=0.05, nesterov=True),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.05, nesterov=True),
        ["momentum_buffer"],
    ),
    "Lion of the config": (
        {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.05}},
        lambda params: Formula(params, lion(1e-3, (0.9, 0.99), 0.05)),
        ["exp_avg"],
    ),
    "DeepSpeedCPULion": (
        lambda params: DeepSpeedCPULion(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.05),
        lambda params: Formula(params, lion(1e-3, (0.9, 0.99), 0.05)),
        ["exp_avg"],
    ),
    "FusedLion": (
        lambda params: FusedLion(params, lr=1e-3, betas=(0.9, 0.99)),
        lambda params: Formula(params, lion(1e-3, (0.9, 0.99), 0.0)),
        ["exp_avg"],
    ),
}


def make_engine(model, optimizer, stage, narrow):
    more = {"communication_data_type": "fp32", "bf16": {"enabled": narrow}, "zero": {"audit_steps": 2}}
    client = {"client": optimizer, "zero_allow_untested_optimizer": False}
    return start(model, stage, 2, None, **({"optimizer": optimizer} if isinstance(optimizer, dict) else client), **more)


class Plain:
    """fp64 masters; gradients come from a model in ``dtype``, one part of the batch at a time."""

    def __init__(self, model, build, narrow):
        self.dtype = torch.bfloat16 if narrow else torch.float64
        self.masters = copy.deepcopy(model).double()
        self.model = copy.deepcopy(model).to(self.dtype)
        self.optimizer = build(self.masters.parameters())

    def step(self, step, world):
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self.masters.parameters()):
                p.copy_(master)
        for master in self.masters.parameters():
            master.grad = torch.zeros_like(master)
        for part in range(world):
            self.model.zero_grad(set_to_none=True)
            loss_on(self.model, step, part).backward()
            for p, master in zip(self.model.parameters(), self.masters.parameters()):
                master.grad += p.grad.double() / world
        clip(list(self.masters.parameters()))
        self.optimizer.step()


def train(engine, rank, steps, first=0):
    for step in range(first, first + steps):
        take_step(engine, loss_on(engine, step, rank))
    return engine


@pytest.mark.sample("values", 12)
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", sorted(CASES))
@on_ranks(2)
def test_equals_a_plain_process(rank, world, case, stage, narrow):
    optimizer, build, states = CASES[case]
    model = seeded(Deep)
    if narrow:  # start from values that bf16 has
        for p in model.parameters():
            p.data = p.data.bfloat16().float()
    plain = Plain(model, build, narrow)
    engine = train(make_engine(model, optimizer, stage, narrow), rank, STEPS)
    for step in range(STEPS):
        plain.step(step, world)
    worst = 0.0
    for p, master in zip(engine.module.parameters(), plain.masters.parameters()):
        worst = max(worst, relative(safe_get_full_fp32_param(p), master))
        for name in states:
            found = safe_get_full_optimizer_state(p, name)
            assert found.shape == master.shape and found.dtype == torch.float32
            own = plain.optimizer.states[master]["m"] if isinstance(plain.optimizer, Formula) else None
            own = plain.optimizer.state[master].get(name) if own is None else own
            own = plain.optimizer.state[master].get("sum") if own is None else own
            worst = max(worst, relative(found, own))
        assert safe_get_full_optimizer_state(p, "no_such_state") is None
    assert engine.optimizer is engine.basic_optimizer or engine.optimizer.stepping.fused
    assert engine._auditing.audit is None  # two steps were compared with whole tensors
    assert worst < (2e-2 if narrow else 2e-6)


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("case", ["Adagrad of the config", "FusedSGD", "Lion of the config"])
@on_ranks(2)
def test_checkpoints_keep_the_states(rank, world, case, stage, folder):
    optimizer = CASES[case][0]
    engine = train(make_engine(seeded(Deep), optimizer, stage, narrow=True), rank, 3)
    engine.save_checkpoint(folder, tag="here")
    train(engine, rank, 3, first=3)
    expected = weights(engine)
    other = train(load_into(make_engine(Deep(), optimizer, stage, narrow=True), folder, tag="here"), rank, 3, first=3)
    found = weights(other)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@on_ranks(2)
def test_eight_bit_states_work_without_zero_and_are_refused_with_it(rank, world, narrow):
    def build(params):
        return Adam8bit(params, lr=3e-3, min_8bit_size=16)

    for stage in (1, 3):
        refused(
            ValueError,
            "Adam8bit packs the states.*use FusedAdam.*stage.: 0",
            make_engine,
            seeded(Deep),
            build,
            stage,
            narrow,
        )
    engine = make_engine(seeded(Deep), build, 0, narrow)
    losses = [take_step(engine, loss_on(engine, 0, rank)) for _ in range(40)]
    assert any(state["exp_avg"].dtype == torch.uint8 for state in engine.basic_optimizer.state.values())
    assert (losses[0] / losses[-1]) > 2
