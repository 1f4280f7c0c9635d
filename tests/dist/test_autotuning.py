"""The section ``autotuning`` in a run: what is measured and written, and how the run ends."""

import contextlib
import json
import os
import sys
import time
import types
from unittest import mock

import pytest
import torch

from deepspeed import DeepSpeedConfigError
from deepspeed.config import DeepSpeedConfig
from engine_models import loss_on, net_engine
from harness import on_ranks
from refusals import refused
from runs import take_step

SLOW_S, FIRST_S = 0.05, 1.5


def tuned(folder, **more):
    return {"autotuning": {"enabled": True, "metric_path": f"{folder}/deep/metrics.json", **more}}


def train(engine, rank, world, steps=9, plain=False, wait=lambda step: None):
    """Steps until the run ends; the number of those that were begun."""
    for step in range(steps):
        try:
            loss = loss_on(engine, step, rank=rank, world=world)
            wait(step)
            take_step(engine, loss, plain)
        except SystemExit as end:
            assert end.code == 0
            return step + 1
    raise AssertionError("the run has not ended")


def read(folder, name="deep/metrics.json"):
    with open(f"{folder}/{name}") as file:
        return json.load(file)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("plain", [False, True])
@on_ranks(2)
def test_steps_are_measured_and_all_ranks_end(rank, world, stage, plain, folder):
    engine = net_engine(world, stage, **tuned(folder, start_profile_step=1, end_profile_step=4))
    waits = {0: FIRST_S, 1: SLOW_S, 2: SLOW_S, 3: SLOW_S}  # a step before the first one is not measured
    assert train(engine, rank, world, plain=plain, wait=lambda step: time.sleep(waits[step])) == 4
    if rank == 0:
        found = read(folder)
        assert found["steps"] == 3 and found["train_batch_size"] == 8 and "flops" not in found
        assert SLOW_S <= found["latency"] < FIRST_S / 4, found
        assert found["throughput"] == pytest.approx(8 / found["latency"])
        assert found["forward"] > 0 and found["step"] > 0 and found["backward"] >= SLOW_S
        assert found["forward"] + found["backward"] + found["step"] == pytest.approx(found["latency"])
        assert found["peak_memory"] >= 0
    engine.destroy()


@on_ranks(1)
def test_time_between_a_step_and_the_next_forward_is_the_scripts_own(rank, world, folder):
    engine = net_engine(world, 0, accumulate=2, **tuned(folder, start_profile_step=1, end_profile_step=2))
    for _ in range(3):
        take_step(engine, loss_on(engine, 0, 4))
    time.sleep(FIRST_S)  # in the middle of the step that is measured
    refused(SystemExit, "0", take_step, engine, loss_on(engine, 0, 4))
    assert read(folder)["latency"] < FIRST_S / 2
    engine.destroy()


@on_ranks(2)
def test_operators_are_counted_where_the_metric_is_flops(rank, world, folder):
    section = tuned(folder, start_profile_step=0, end_profile_step=3, metric="flops")
    engine = net_engine(world, 1, model=torch.nn.Linear(64, 32, bias=False), **section)
    for step in range(3):
        if step == 2:
            with pytest.raises(SystemExit):
                take_step(engine, engine(torch.ones(4, 64)).sum())
        else:
            take_step(engine, engine(torch.ones(4, 64)).sum())
    if rank == 0:
        found = read(folder)
        products = 2 * 2 * 4 * 64 * 32  # forward, and the gradient of the weight
        least = products / found["latency"]  # as the engine divides: a product of both could be rounded down
        assert found["steps"] == 1 and least <= found["flops"] < 1.3 * least
    engine.destroy()


@contextlib.contextmanager
def imported(name, module):
    """``module`` is what an import of ``name`` finds. Other modules that are imported meanwhile stay, unlike in
    mock.patch.dict: torch registers operators while it is imported, and fails when that happens twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        yield


def planner(plans):
    """A stand-in for deepspeed.planner, whose figures say what it was asked."""

    def plan(model, config, world, memory, sample):
        size = config["train_micro_batch_size_per_gpu"]
        if size == 3:
            raise RuntimeError("cannot plan three")
        params = {name: (tuple(param.shape), param.device.type) for name, param in model.named_parameters()}
        plans.append((params, world, memory, sample))
        fits = config["zero_optimization"]["stage"] > 0
        return types.SimpleNamespace(fits=fits, peak_bytes=100 * size, seconds=0.5, why="" if fits else "too large")

    return imported("deepspeed.planner", types.SimpleNamespace(plan=plan))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_facts_about_the_model_and_the_planners_answers(rank, world, stage, folder):
    asked, path = [], f"{folder}/info/model_info.json"
    if rank == 0:
        os.makedirs(f"{folder}/info")
        sizes = {"a": (0, 1), "b": (1, 6), "c": (2, 3)}
        rows = {
            name: {"train_micro_batch_size_per_gpu": size, "zero_optimization": {"stage": own}}
            for name, (own, size) in sizes.items()
        }
        with open(f"{folder}/info/candidates.json", "w") as file:
            json.dump(rows, file)
    with planner(asked):
        section = {"enabled": True, "model_info": {"profile": True}, "model_info_path": path}
        engine = net_engine(world, stage, autotuning=section)
        with pytest.raises(SystemExit) as end:
            loss_on(engine, 0, rank=rank, world=world)
        assert end.value.code == 0
    if rank == 0:
        facts, plans = read(folder, "info/model_info.json"), read(folder, "info/plans.json")
        whole = sum(param.numel() for param in asked_params(asked))
        assert facts["num_params"] == whole and 0 < facts["trainable_num_params"] < whole
        assert facts["activation_mem_per_gpu"] >= 4 * 4 * 6 * 12 and facts["memory_per_gpu"] > 2**20
        assert facts["train_micro_batch_size_per_gpu"] == 4 and facts["rank"] == 0
        assert plans["a"] == {"fits": False, "peak_bytes": 100, "seconds": 0.5, "why": "too large"}
        assert plans["b"]["fits"] is True and plans["b"]["peak_bytes"] == 600
        assert plans["c"] == {"fits": None, "why": "RuntimeError: cannot plan three"}
        for (params, size, memory, ((tokens,), kwargs)), rows in zip(asked, (1, 6), strict=True):
            assert params["first.weight"] == ((12, 12), "meta") and "tied.weight" not in params
            assert (size, memory, kwargs, tuple(tokens.shape)) == (2, facts["memory_per_gpu"], {}, (rows, 6))
    engine.destroy()


def asked_params(asked):
    return [torch.empty(shape, device="meta") for shape, _ in asked[0][0].values()]


@on_ranks(1)
def test_planning_ends_in_time(rank, world, folder):
    rows = {str(n): {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}} for n in range(9)}
    with open(f"{folder}/candidates.json", "w") as file:
        json.dump(rows, file)
    section = {"enabled": True, "model_info": {"profile": True}, "model_info_path": f"{folder}/model_info.json"}
    with planner(mock.Mock(append=lambda row: time.sleep(0.1))):
        engine = net_engine(world, 0, autotuning={**section, "experiment_timeout": 0.5})
        refused(SystemExit, "0", loss_on, engine, 0)
    assert 1 <= len(read(folder, "plans.json")) <= 4 and read(folder, "model_info.json")["num_params"] > 0
    engine.destroy()


@on_ranks(1)
def test_without_a_planner_there_are_facts_alone(rank, world, folder):
    with open(f"{folder}/candidates.json", "w") as file:
        json.dump({"a": {"train_micro_batch_size_per_gpu": 1}}, file)
    section = {"enabled": True, "model_info": {"profile": True}, "model_info_path": f"{folder}/model_info.json"}
    with imported("deepspeed.planner", None):
        engine = net_engine(world, 0, autotuning=section)
        refused(SystemExit, "0", loss_on, engine, 0)
    assert read(folder, "model_info.json")["num_params"] > 0 and not os.path.exists(f"{folder}/plans.json")
    engine.destroy()


@on_ranks(2, init=True)  # torch 2 sets the hook in init_process_group
def test_an_end_for_want_of_memory_is_written(rank, world, folder):
    before = sys.excepthook
    engine = net_engine(world, 0, **tuned(folder))
    if rank == 1:
        with mock.patch("sys.stderr"):
            sys.excepthook(ValueError, ValueError("of the script"), None)
            assert os.path.getsize(f"{folder}/deep/metrics.json") == 0
            error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
            sys.excepthook(RuntimeError, error, None)
        assert read(folder)["failure"].startswith("memory: DefaultCPUAllocator")
    engine.destroy()
    assert sys.excepthook is before


@on_ranks(2)
def test_metrics_that_cannot_be_written_are_an_error_on_all_ranks(rank, world, folder):
    with open(f"{folder}/deep", "w"):
        pass
    words = "rank 0: autotuning.metric_path: .*rank 0 can write to"
    refused(ValueError, words, net_engine, world, 0, **tuned(folder))


def test_steps_to_measure_are_in_order():
    section = {"enabled": True, "start_profile_step": 5}
    words = "autotuning.end_profile_step.*no step would be measured"
    refused(DeepSpeedConfigError, words, DeepSpeedConfig, {"train_batch_size": 1, "autotuning": section})
    DeepSpeedConfig({"train_batch_size": 1, "autotuning": {**section, "enabled": False}})
