"""The rules of a load: accumulation windows, the configuration's options, and loads that fail, after which everything
is as it was."""

import os
import pathlib

import pytest
import torch

import deepspeed
import peer_model
from deepspeed.checkpoint.layouts import names
from harness import on_ranks
from models import seeded, two_layers
from refusals import refused
from runs import KEEP_GATHERED, by_rank_0, engine_of, load_into, moments, raised, settings, weights
from runs import identical as equal
from runs import train as train_on


def whole(engine):
    """Everything that training has of the parameters."""
    found = weights(engine)
    for name, tensors in moments(engine, engine.optimizer_states_of_test).items():
        found.update({(name, place): one.clone() for place, one in enumerate(tensors) if one is not None})
    return found


# ---- accumulation windows ------------------------------------------------------------------------------------------
# Over 2 ranks 6 micro-batches of 2: windows of 4 go over the end of an epoch.
ROWS = [(torch.randn(7, generator=torch.Generator().manual_seed(index)), torch.tensor(index)) for index in range(22)]


def make_windowed(stage, seed=0, **more):
    engine = engine_of(two_layers(7, seed=seed), settings(stage, accumulate=4, zero=KEEP_GATHERED, **more))
    engine.training_dataloader = engine.deepspeed_io(ROWS, num_local_io_workers=0)
    engine.optimizer_states_of_test = ("exp_avg", "exp_avg_sq")
    return engine, iter(deepspeed.utils.RepeatingLoader(engine.training_dataloader))


def micro_steps(engine, batches, count, until="step"):
    seen = []
    for number in range(count):
        rows, numbers = next(batches)
        seen.append(numbers.tolist())
        engine.backward(engine(rows).pow(2).mean())
        if until == "step" or number + 1 < count:
            engine.step()
    return seen


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_window_that_was_saved_in_its_middle_starts_anew(rank, world, stage, folder):
    engine, batches = make_windowed(stage)
    micro_steps(engine, batches, 4)
    engine.save_checkpoint(folder, tag="boundary")
    begun = micro_steps(engine, batches, 3)
    engine.save_checkpoint(folder, tag="middle")
    begun += micro_steps(engine, batches, 1, until="backward")
    engine.save_checkpoint(folder, tag="before the step")
    engine.step()
    straight = whole(engine)
    for tag in ("boundary", "middle", "before the step"):
        other, again = make_windowed(stage, seed=5)
        other.load_checkpoint(folder, tag=tag)
        assert (other.micro_steps, other.global_steps) == (4, 1), tag
        assert micro_steps(other, again, 4) == begun, tag
        assert other.global_steps == 2 and equal(whole(other), straight), tag


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_gradients_that_were_accumulated_before_a_load_are_forgotten(rank, world, folder, stage):
    engine, batches = make_windowed(stage)
    micro_steps(engine, batches, 4)
    engine.save_checkpoint(folder, tag="boundary")
    for flags in ({}, {"load_optimizer_states": False}, {"load_module_only": True}):
        results = []
        for pending in (0, 2):
            engine.load_checkpoint(folder, tag="boundary")
            micro_steps(engine, iter([(torch.ones(2, 7), torch.ones(2))] * 4), pending)
            engine.load_checkpoint(folder, tag="boundary", **flags)
            assert engine.micro_steps == 4 and engine.losses is None, (stage, flags)
            micro_steps(engine, iter([(torch.ones(2, 7), torch.ones(2))] * 4), 4)
            assert engine.global_steps == 2, (stage, flags)
            results.append(whole(engine))
        assert equal(*results), (stage, flags)


# ---- the configuration wins ----------------------------------------------------------------------------------------

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": OPTIMIZER,
}


def group(key):
    return lambda engine: engine.optimizer.param_groups[0][key]


def with_params(**params):
    return {"optimizer": {**OPTIMIZER, "params": {**OPTIMIZER["params"], **params}}}


# Every option that a configuration has and a checkpoint holds, too: what is changed, where it works, and what must be
# there after a load.
# The rules of the loss scale: tests/python/optim/test_loss_scaler.py.
CHANGES = {
    "gradient_clipping": ({"gradient_clipping": 0.25}, lambda engine: engine.stepping.clip, 0.25),
    "no gradient_clipping": ({"gradient_clipping": 0.0}, lambda engine: engine.stepping.clip, 0.0),
    "optimizer.params.lr": (with_params(lr=0.03), group("lr"), 0.03),
    "optimizer.params.betas": (with_params(betas=[0.8, 0.9]), group("betas"), [0.8, 0.9]),
    "optimizer.params.eps": (with_params(eps=1e-6), group("eps"), 1e-6),
    "optimizer.params.weight_decay": (with_params(weight_decay=0.5), group("weight_decay"), 0.5),
    "gradient_accumulation_steps": (
        {"gradient_accumulation_steps": 2},
        lambda engine: (engine.gradient_accumulation_steps(), engine.micro_steps),
        (2, 4),
    ),
    "sparse_gradients": (
        {"sparse_gradients": True},
        lambda engine: engine.sparse_gradients_enabled(),  # the names are the checkpoint's: test_sparse_gradients.py
        True,
    ),
}


def make_configured(stage, seed=0, **changes):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Embedding(9, 7), torch.nn.Linear(7, 3))
    return engine_of(net, {**BASE, "zero_optimization": {"stage": stage}, **changes})


def train(engine, steps):
    train_on(engine, lambda step, micro: engine(torch.tensor([(step + micro) % 9, 3])).pow(2).mean(), steps)


@on_ranks(2)
def test_the_configuration_wins_over_what_was_saved(rank, world, folder):
    for stage in range(4):
        place = os.path.join(folder, str(stage))
        engine = make_configured(stage)
        train(engine, 2)
        engine.save_checkpoint(place, tag="plain")
        engine.optimizer.param_groups[0]["lr"] = 0.007  # as scripts do that decay by hand
        engine.save_checkpoint(place, tag="by hand")
        for name, (change, value, wanted) in CHANGES.items():
            if name == "sparse_gradients" and stage > 0:
                continue
            other = load_into(make_configured(stage, seed=5, **change), place, tag="plain")
            found = value(other)
            assert (list(found) if isinstance(wanted, list) else found) == wanted, (stage, name, found)
            train(other, 1)
        # Values that the configuration has not changed go on as they were saved.
        for change in ({}, with_params(weight_decay=0.5)):
            other = load_into(make_configured(stage, seed=5, **change), place, tag="by hand")
            assert group("lr")(other) == 0.007, (stage, change)
        # A schedule decides the rate; its own options are the configuration's.
        scheduled = make_configured(stage, scheduler=SCHEDULER)
        train(scheduled, 2)
        scheduled.save_checkpoint(place, tag="scheduled")
        rate = group("lr")(scheduled)
        faster = {"type": "WarmupLR", "params": {**SCHEDULER["params"], "warmup_max_lr": 0.02}}
        for change, factor in ((with_params(lr=0.5), 1), ({"scheduler": faster}, 2)):
            other = load_into(
                make_configured(stage, seed=5, **{"scheduler": SCHEDULER, **change}), place, tag="scheduled"
            )
            assert group("lr")(other) == pytest.approx(factor * rate), (stage, change)


# ---- loads that fail -----------------------------------------------------------------------------------------------
class Schedule:
    """A schedule of somebody else, which cannot load on one rank."""

    def __init__(self, optimizer, fails):
        self.optimizer, self.fails, self.count = optimizer, fails, 0

    def step(self):
        self.count += 1

    def get_last_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        for group in self.optimizer.param_groups:
            group["lr"] = 77.0
        if self.fails:
            raise KeyError("this schedule cannot be loaded")


def make_peer(stage, fails=False, states=("exp_avg", "exp_avg_sq"), dtype="fp32", **more):
    config = {**peer_model.what(1, dtype)["config"], "zero_optimization": {"stage": stage}, **more}
    config.pop("scheduler", None)
    net = seeded(peer_model.peer_net, seed=9)
    params = [p for p in net.parameters() if p.requires_grad]
    engine = engine_of(net, config, model_parameters=params, lr_scheduler=lambda optimizer: Schedule(optimizer, fails))
    engine.optimizer_states_of_test = states
    return engine


def everything(engine):
    """Beside the parameters: what stands in the groups, counters, schedule, random numbers."""
    groups = engine.basic_optimizer.param_groups
    groups = [{key: value for key, value in one.items() if key != "params"} for one in groups]
    counters = engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples
    return groups, counters, engine.lr_scheduler.count, torch.get_rng_state().tolist(), engine.core.steps().tolist()


def damage(folder):
    """Cuts a file of one checkpoint, removes one of another, and the manifests of both."""
    os.truncate(names.RUN_STATES.path(str(folder / "broken run"), rank=1), 100)
    for path in [*folder.glob("*r*/*.json"), *folder.glob("short/*rank_1_mp_rank_00_optim*")]:
        path.unlink()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(rank, world, stage, folder):
    engine = make_peer(stage)
    peer_model.train(engine, 2, rank)
    for tag in ("whole", "broken run", "short"):
        engine.save_checkpoint(folder, tag=tag)
    torch.distributed.barrier()
    by_rank_0(rank, damage, pathlib.Path(folder))
    adagrad = {"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}
    cases = {
        "a schedule that fails on rank 1": ({"fails": rank == 1}, "whole", "schedule cannot be loaded"),
        "another optimizer": ({"states": ("sum",), **adagrad}, "whole", "another optimizer"),
        "run states of rank 1 that are damaged": ({}, "broken run", "damaged or no checkpoint"),
    }
    if stage > 0:
        cases["a file that is missing"] = ({}, "short", "optim_states.pt")
    for case, (options, tag, words) in cases.items():
        other = make_peer(stage, **options)
        peer_model.train(other, 1, rank)
        before = whole(other), everything(other)
        refused(Exception, words, other.load_checkpoint, folder, tag=tag)
        assert equal(whole(other), before[0]) and everything(other) == before[1], case
        assert other.loaded_checkpoint_dp_world_size is None and other.loaded_engine_state == {}, case
        peer_model.train(other, 1, rank, first=1)


@on_ranks(2)
def test_the_clients_state_is_a_dict(rank, world, folder):
    engine = engine_of(two_layers(7), settings(1))
    error = refused(TypeError, "client_state is a dict", engine.save_checkpoint, folder, client_state=[1])
    assert "this is list" in str(error) and os.listdir(folder) == []
    kind, text = raised(engine.save_checkpoint, folder, client_state=[1] if rank == 1 else {})
    assert kind == ("TypeError" if rank == 1 else "RuntimeError") and "client_state is a dict" in text
    assert rank == 1 or "rank 1: TypeError" in text
    engine.save_checkpoint(folder, client_state=None)
    assert engine.load_checkpoint(folder)[0] is not None
