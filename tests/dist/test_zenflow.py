"""ZenFlow: against its schedule, written down in float64; what it does not change; checkpoints inside an interval.

The schedule in words: [Note: schedule] in csrc/zero/step/strategies/zenflow.cpp.
"""

import math

import pytest
import torch

import deepspeed
from deepspeed.host.cores import split_cores
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.utils import safe_get_full_fp32_param
from harness import on_ranks
from models import seeded
from refusals import refused
from runs import initialized, load_into, settings, take_step
from runs import weight_list as weights
from zero_models import BETAS, CLIP, DECAY, LR
from zero_training import ROWS, Deep, loss_of, loss_on, start

LONGEST, EPS = 16, 1e-8


class Schedule:
    """The model in fp64, trained by the schedule; ``flow`` is the section of the configuration."""

    def __init__(self, model, flow):
        self.model, self.flow = model.double(), flow
        self.params = list(self.model.parameters())
        self.masters = [p.detach().clone() for p in self.params]
        self.m = [torch.zeros_like(p) for p in self.masters]
        self.v = [torch.zeros_like(p) for p in self.masters]
        self.steps, self.late_steps = [0] * len(self.params), [0] * len(self.params)
        self.chosen, self.rest = None, [torch.zeros_like(p) for p in self.masters]
        self.made = self.in_interval = self.since_choice = self.updates = 0
        self.norms, self.pending = 0.0, False

    def _update(self, i, grad, mask, number):
        m = self.m[i] * BETAS[0] + grad * (1 - BETAS[0])
        v = self.v[i] * BETAS[1] + grad * grad * (1 - BETAS[1])
        m_hat, v_hat = m / (1 - BETAS[0] ** number), v / (1 - BETAS[1] ** number)
        w = self.masters[i] * (1 - LR * DECAY) - LR * m_hat / (v_hat.sqrt() + EPS)
        for kept, new in ((self.m[i], m), (self.v[i], v), (self.masters[i], w)):
            kept.copy_(torch.where(mask, new, kept))

    def _show(self, everything):
        for p, master, chosen in zip(self.params, self.masters, self.chosen or [None] * len(self.params)):
            p.data.copy_(master if everything else torch.where(chosen, master, p.data))

    def _choose(self):
        self.chosen = []
        for p in self.params:
            mask = torch.ones_like(p, dtype=torch.bool)
            if p.dim() > 1:
                sums = p.grad.reshape(p.shape[0], -1).abs().sum(0)
                count = max(1, int(len(sums) * self.flow["topk_ratio"] + 1e-9))
                keep = torch.zeros(len(sums), dtype=torch.bool)
                keep[torch.sort(sums, descending=True, stable=True).indices[:count]] = True
                mask = keep.expand(p.shape[0], -1).reshape(p.shape)
            self.chosen.append(mask)
        self.since_choice = 0

    @torch.no_grad()
    def step(self):
        """On the gradients in ``.grad``."""
        torch.nn.utils.clip_grad_norm_(self.params, CLIP)
        if self.made < self.flow.get("full_warm_up_rounds", 0):
            for i, p in enumerate(self.params):
                self.steps[i] += 1
                self.late_steps[i] += 1
                self._update(i, p.grad, torch.ones_like(p, dtype=torch.bool), self.steps[i])
            self.made += 1
            self._show(True)
            return
        if self.chosen is None or (self.in_interval == 0 and self.since_choice >= self.flow["select_interval"]):
            if self.pending:
                self._show(True)
            self.pending = False
            self._choose()
        self.made += 1
        self.in_interval += 1
        self.since_choice += 1
        chosen_squares = total_squares = 0.0
        for i, p in enumerate(self.params):
            self.steps[i] += 1
            self._update(i, p.grad, self.chosen[i], self.steps[i])
            self.rest[i] += p.grad
            chosen_squares += float((p.grad[self.chosen[i]] ** 2).sum())
            total_squares += float((p.grad**2).sum())
        self._show(False)
        ends = self.in_interval == self.flow["update_interval"]
        if self.flow["update_interval"] == "auto":
            self.norms += math.sqrt(max(0.0, total_squares - chosen_squares))
            chosen, rest = (sum(float((mask == of).sum()) for mask in self.chosen) for of in (True, False))
            ratio = self.flow.get("auto_ratio", 0.99)
            reached = self.norms / math.sqrt(rest) >= ratio * math.sqrt(chosen_squares / chosen)
            ends = self.in_interval == LONGEST or reached
        if not ends:
            return
        if self.pending:
            self._show(True)
        for i in range(len(self.params)):
            self.late_steps[i] += 1
            self._update(i, self.rest[i], ~self.chosen[i], self.late_steps[i])
            self.rest[i].zero_()
        self.in_interval, self.norms, self.updates = 0, 0.0, self.updates + 1
        self.pending = self.flow.get("overlap_step", False)
        if not self.pending:
            self._show(True)


def make(stage, flow, accumulate=1, steps=None, **more):
    zero = {"reduce_bucket_size": 100, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    if flow is not None:
        zero["zenflow"] = flow
    return start(seeded(Deep), stage, 1, accumulate, zero=zero, **more)


def train(engine, rank, world, first, last, accumulate=1):
    for step in range(first, last):
        for part in range(accumulate):
            take_step(engine, loss_on(engine, step, part * world + rank))
    return engine


def everything(engine):
    return weights(engine) + [safe_get_full_fp32_param(p) for p in engine.module.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


FLOWS = {
    "intervals": {"topk_ratio": 0.3, "select_strategy": "step", "select_interval": 6, "update_interval": 3},
    "overlap": {
        "topk_ratio": 0.3,
        "select_strategy": "step",
        "select_interval": 6,
        "update_interval": 3,
        "overlap_step": True,
    },
    "auto": {
        "topk_ratio": 0.2,
        "select_strategy": "step",
        "select_interval": 7,
        "update_interval": "auto",
        "full_warm_up_rounds": 2,
        "offload": True,
    },
}


# ---- the schedule -------------------------------------------------------------------------------------------------
@pytest.mark.any_device
@pytest.mark.sample("values", 4)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", FLOWS)
@on_ranks()
def test_follows_the_schedule(rank, world, name, stage, accumulate):
    flow = FLOWS[name]
    engine = make(stage, dict(flow), accumulate)
    reference = Schedule(seeded(Deep), flow)
    for step in range(12):
        train(engine, rank, world, step, step + 1, accumulate)
        reference.model.zero_grad()
        for part in range(accumulate * world):
            (loss_on(reference.model, step, part) / (accumulate * world)).backward()
        reference.step()
        for mine, theirs in zip(weights(engine), reference.params):
            assert (mine.cpu().double() - theirs).abs().max() < 2e-5, f"step {step}"
    assert engine.core.strategy_figures()["updates of the rest"] == reference.updates
    assert reference.updates > 0


@on_ranks(1)
def test_a_select_interval_below_the_update_interval_counts_as_that(rank, world):
    results = []
    for select in (2, 4):
        engine = train(
            make(2, {"select_strategy": "step", "select_interval": select, "update_interval": 4}), rank, world, 0, 12
        )
        results.append((engine.core.strategy_figures()["choices"], everything(engine)))
    (hasty, ours), (patient, theirs) = results
    assert hasty == patient == 3 and same(ours, theirs)


@pytest.mark.sample("values")
@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_warm_up_throughout_is_zero_offload(rank, world, stage, dtype):
    more = {dtype: {"enabled": True}} if dtype else {}
    flows = (None, {"full_warm_up_rounds": 1000}, {"topk_ratio": 1.0, "overlap_step": True})
    first, *others = (everything(train(make(stage, flow, **more), rank, world, 0, 5)) for flow in flows)
    assert all(same(first, other) for other in others)


# ---- checkpoints --------------------------------------------------------------------------------------------------
@pytest.mark.any_device
@pytest.mark.sample("values", 5)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("writer", [None, "safetensors"])
@pytest.mark.parametrize("saved_at", [1, 4, 6, 7])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", FLOWS)
@on_ranks()
def test_a_checkpoint_inside_an_interval_resumes(rank, world, name, stage, saved_at, writer, folder):
    more = {"checkpoint": {"writer": {"format": writer}}} if writer else {}
    straight = train(make(stage, dict(FLOWS[name]), **more), rank, world, 0, saved_at)
    straight.save_checkpoint(folder)
    train(straight, rank, world, saved_at, 12)
    resumed = train(load_into(make(stage, dict(FLOWS[name]), **more), folder), rank, world, saved_at, 12)
    untouched = train(make(stage, dict(FLOWS[name]), **more), rank, world, 0, 12)
    assert same(everything(straight), everything(resumed)) and same(everything(straight), everything(untouched))


@on_ranks(2)
def test_checkpoints_of_other_runs(rank, world, folder):
    """Into another stage; into a run without ZenFlow, and from one."""
    flow = FLOWS["overlap"]
    first = train(make(2, dict(flow)), rank, world, 0, 7)
    first.save_checkpoint(folder, tag="flow")
    other = load_into(make(3, dict(flow)), folder, tag="flow")
    for engine in (first, other):
        train(engine, rank, world, 7, 12)
    close = all((a - b).abs().max() < 1e-5 for a, b in zip(everything(first), everything(other)))
    plain = train(load_into(make(2, None), folder, tag="flow"), rank, world, 7, 9)
    plain.save_checkpoint(folder, tag="plain")
    back = load_into(make(1, dict(flow)), folder, tag="plain")
    masters = same(everything(plain), everything(back))
    train(back, rank, world, 9, 12)
    assert close and masters


# ---- keys ---------------------------------------------------------------------------------------------------------
def test_names_and_defaults():
    flow = ZenFlowConfig()
    assert (flow.topk_ratio, flow.select_strategy, flow.update_interval) == (0.1, "auto", "auto")
    assert split_cores(list(range(8)), 0.5) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert split_cores([3], 0.5) == ([3], [3])


@on_ranks(1)
def test_a_choice_for_each_epoch(rank, world):
    data = torch.utils.data.TensorDataset(torch.rand(4 * ROWS * world, 6), torch.rand(4 * ROWS * world, 2))
    flow = {"select_strategy": "epoch", "update_interval": 2}
    zero = {"offload_optimizer": {"device": "cpu", "pin_memory": False}, "zenflow": flow}
    engine, _, loader, _ = initialized(seeded(Deep), settings(2, ROWS, rate=LR, zero=zero), training_data=data)
    for _ in range(3):
        for x, target in loader:
            take_step(engine, loss_of(engine(x), target))
    assert engine.core.strategy_figures()["choices"] == 3
    engine = make(2, {"select_strategy": "epoch"})
    refused(ValueError, "steps_per_epoch", train, engine, rank, world, 0, 1)
    assert engine.zenflow_config().select_strategy == "epoch"


BAD = [
    ({"topk_ratio": 1.5}, {}, "topk_ratio"),
    ({"topk": 0.5}, {}, "topk"),
    ({}, {"offload_optimizer": {"device": "none"}}, "device"),
    ({}, {"stage": 0}, "stage"),
    ({}, {"offload_optimizer": {"device": "cpu", "super_offload": True}}, "super_offload"),
]


@pytest.mark.parametrize("flow, zero, named", BAD)
def test_bad_sections_are_refused(flow, zero, named):
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": flow, **zero},
    }
    refused(Exception, named, deepspeed.initialize, model=Deep(), config=config)


@on_ranks(1)
def test_optimizers_that_cannot_be_cut(rank, world):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {}}
    config = {"train_batch_size": 1, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    model = Deep()
    refused(
        ValueError,
        "DeepSpeedCPUAdam",
        deepspeed.initialize,
        model=model,
        config=config,
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    refused(
        ValueError,
        "lamb",
        deepspeed.initialize,
        model=Deep(),
        config={**config, "optimizer": {"type": "Lamb", "params": {"lr": 0.1}}},
    )
    model = Deep()
    engine = deepspeed.initialize(model=model, config=config, optimizer=DeepSpeedCPUAdam(model.parameters()))[0]
    assert type(engine.basic_optimizer).__name__ == "DeepSpeedCPUAdam"
