"""Events that monitors get from engines: names, values and samples; errors on all ranks; a killed run."""

import csv
import glob
import os
import subprocess
import sys
import threading

import pytest
import torch

import deepspeed
import pipe_models
from deepspeed.monitor.monitor import Monitor, MonitorMaster
from deepspeed.utils.timer import BACKWARD_INNER_GLOBAL_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER
from engine_models import loss_on, net_engine
from harness import on_ranks
from models import Parts
from moe_models import batch as moe_batch
from moe_models import moe_net
from places import PYTHON
from refusals import refused
from runs import engine_of, settings, take_step, with_fp16

STEPS, MICRO, SAMPLES = 4, 2, 8


def csv_section(folder):
    return {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}


def read(folder):
    """{name of the file: (step, value) of its rows}"""
    found = {}
    for path in glob.glob(f"{folder}/job/*.csv"):
        with open(path, newline="") as file:
            head, *rows = csv.reader(file)
        assert head[0] == "step"
        found[os.path.basename(path)[:-4]] = [(int(step), float(value)) for step, value in rows]
    return found


def of_steps(values, samples=SAMPLES):
    return [(samples * (step + 1), pytest.approx(value, rel=1e-6)) for step, value in enumerate(values)]


def train(engine, rank, world, steps=STEPS):
    """Mean losses, learning rates and norms of the steps."""
    found = []
    for step in range(steps):
        losses = [
            take_step(engine, loss_on(engine, MICRO * step + micro, rank=rank, world=world)) for micro in range(MICRO)
        ]
        found.append((sum(losses) / MICRO, engine.get_lr()[0], float(engine.get_global_grad_norm())))
    return zip(*found)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_events_of_a_plain_engine(rank, world, stage, folder):
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    engine = net_engine(world, stage, MICRO, **csv_section(folder), **schedule)
    losses, rates, norms = train(engine, rank, world)
    engine.monitor.write_events([("Time per step", 1.5, engine.global_samples)])
    engine.destroy()
    if rank != 0:
        assert engine.monitor.monitors == {}
        return
    found = read(folder)
    assert len(set(rates)) > 1
    assert found.pop("Train_Samples_train_loss") == of_steps(losses)
    assert found.pop("Train_Samples_lr") == of_steps(rates)
    assert found.pop("Train_Samples_grad_norm") == of_steps(norms)
    speeds = found.pop("Train_Samples_samples_per_sec")  # of steps that the throughput timer counts
    assert [step for step, _ in speeds] == [24, 32] and all(value > 0 for _, value in speeds)
    assert found == {"Time_per_step": [(32, 1.5)]}


@on_ranks(1)
def test_events_of_the_timers(rank, world, folder):
    """All five: the inner timers of backward measure something here, whether or not the engine uses them."""
    engine = net_engine(world, 0, MICRO, wall_clock_breakdown=True, **csv_section(folder))
    timers = [engine.progress.timers(name) for name in (BACKWARD_INNER_GLOBAL_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER)]
    for _ in range(2):
        for timer in timers:
            timer.start()
            timer.stop()
        train(engine, rank, world, 1)
    engine.destroy()
    found = {name.split("_ms_")[1]: rows for name, rows in read(folder).items() if "_ms_" in name}
    assert sorted(found) == ["backward", "backward_allreduce", "backward_inner", "forward", "step"]
    assert all([step for step, _ in rows] == [8, 16] and min(rows)[1] > 0 for rows in found.values())


@on_ranks(1)
def test_the_loss_scale_is_an_event(rank, world, folder):
    model = Parts(lambda net, x: (net.weight * x).sum(), weight=torch.nn.Parameter(torch.ones(4)))
    with with_fp16():
        options = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "fp16": {"enabled": True, "loss_scale": 64}}
        engine = engine_of(model, {**options, **csv_section(folder)})
        take_step(engine, engine(torch.ones(4, dtype=torch.float16)))
    engine.destroy()
    assert read(folder)["Train_Samples_loss_scale"] == [(1, 64.0)]


@on_ranks(2, init=True)
def test_events_of_a_pipeline(rank, world, folder):
    engine = pipe_models.engine_of("plain", world, world, MICRO, **csv_section(folder))
    data, losses = pipe_models.batches("plain", STEPS + 1, MICRO, 0), []
    for _ in range(STEPS):
        losses.append(engine.train_batch(data).item())
    loss = engine.eval_batch(data).item()
    norm, rate = float(engine.get_global_grad_norm()), engine.get_lr()[0]
    engine.destroy()
    if rank == 0:
        found, samples = read(folder), MICRO * pipe_models.MICRO
        assert found.pop("Train_Samples_train_loss") == of_steps(losses, samples)
        assert found.pop("Train_Samples_lr") == of_steps([rate] * STEPS, samples)
        assert found.pop("Train_Samples_eval_loss") == [(STEPS * samples, pytest.approx(loss))]
        norms = found.pop("Train_Samples_grad_norm")
        assert [step for step, _ in norms] == [4, 8, 12, 16] and norms[-1][1] == pytest.approx(norm)
        assert [step for step, _ in found.pop("Train_Samples_samples_per_sec")] == [12, 16] and not found


@on_ranks(2, init=True)
def test_events_of_experts(rank, world, folder):
    sizes = {"train_batch_size": SAMPLES * world, **csv_section(folder)}
    engine = engine_of(moe_net(rank, 4, 2, 1, True, False), settings(1, None, **sizes))
    losses = [take_step(engine, engine(moe_batch(step, rank))) for step in range(2)]
    statistics = engine.moe_statistics()["layer"]
    engine.destroy()
    if rank == 0:
        found = read(folder)
        assert found["Train_Samples_train_loss"] == of_steps(losses, SAMPLES * world)
        for name in "dropped_share router_entropy busiest_over_mean aux_loss exchange_bytes exchange_ms".split():
            rows = found[f"Train_MoE_layer_{name}"]
            assert [step for step, _ in rows] == [16, 32] and rows[-1][1] == pytest.approx(statistics[name])


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@on_ranks(2)
def test_events_of_offloaded_states(rank, world, device, folder):
    offload = {"device": device, "nvme_path": f"{folder}/states"}
    os.makedirs(offload["nvme_path"], exist_ok=True)
    engine = net_engine(world, 2, MICRO, zero={"offload_optimizer": offload}, **csv_section(folder))
    losses, _, norms = train(engine, rank, world, 2)
    engine.destroy()
    if rank == 0:
        found = read(folder)
        assert found["Train_Samples_train_loss"] == of_steps(losses)
        assert found["Train_Samples_grad_norm"] == of_steps(norms)
        waits = found["Train_Offload_waited_ms_" + {"cpu": "host", "nvme": "file"}[device]]
        assert [step for step, _ in waits] == [8, 16] and all(value >= 0 for _, value in waits)


# ---- what goes wrong -------------------------------------------------------------------------------------------------
@on_ranks(2)
def test_a_monitor_that_cannot_be_opened_is_an_error_on_all_ranks(rank, world, folder):
    file = f"{folder}/file"
    with open(file, "w"):
        pass
    for section in ("csv_monitor", "tensorboard"):
        keys = {"enabled": True, "output_path": file}
        words = rf"Not a directory: rank 0, on .*{file}/DeepSpeedJobName. Set {section}.output_path"
        error = refused(NotADirectoryError, words, net_engine, world, 1, **{section: keys})
        assert ("the metrics of this run cannot be written: rank 0: " in str(error)) == (rank != 0)
    for section, name in (("wandb", "wandb"), ("comet", "comet_ml")):
        sys.modules[name] = None  # as if it were not installed
        try:
            kind = ImportError if rank == 0 else RuntimeError
            refused(kind, f"-m pip install {name}", net_engine, world, 1, **{section: {"enabled": True}})
        finally:
            del sys.modules[name]
    kind = ValueError if rank == 0 else RuntimeError
    refused(kind, "no monitor named 'mine'", net_engine, world, 1, monitors={"mine": {}})


class Stuck(Monitor):
    """A monitor whose server does not answer."""

    def __init__(self, gate):
        super().__init__(None)
        self.enabled, self.gate, self.events = True, gate, []

    def write_events(self, event_list):
        self.gate.wait()
        self.events += event_list


@on_ranks(1)
def test_a_monitor_that_blocks_does_not_slow_a_step(rank, world, folder):
    """Steps are made while its first call has not returned."""
    engine = net_engine(world, 0, MICRO, **csv_section(folder))
    assert isinstance(engine.monitor, MonitorMaster)
    stuck = Stuck(threading.Event())
    engine.monitor.monitors["stuck"] = stuck
    losses, _, _ = train(engine, rank, world, 10)
    assert engine.global_steps == 10 and stuck.events == []
    stuck.gate.set()
    engine.destroy()
    assert len([name for name, _, _ in stuck.events if name == "Train/Samples/train_loss"]) == 10
    assert read(folder)["Train_Samples_train_loss"] == of_steps(losses)


# ---- a killed run ----------------------------------------------------------------------------------------------------
RUN = """
import os, signal, sys, torch, deepspeed
steps, kill = map(int, sys.argv[1:])
torch.manual_seed(0)
config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "steps_per_print": 100000,
          "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "job"}}
engine = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config)[0]
engine.load_checkpoint("saved")
while engine.global_steps < steps:
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    if engine.global_steps == 700 and kill:
        engine.save_checkpoint("saved")
    if engine.global_steps == kill:
        engine.monitor.flush()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_with_no_step_twice(tmp_path):
    """1,000 steps, killed after 900, resumed from 700."""
    env = {**os.environ, "PYTHONPATH": PYTHON, "OMP_NUM_THREADS": "1"}
    codes = [
        subprocess.run([sys.executable, "-c", RUN, *given], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL).returncode
        for given in (("1000", "900"), ("1000", "0"))
    ]
    assert codes == [-9, 0]
    for name, rows in read(tmp_path / "logs").items():
        seen = [step for step, _ in rows]
        wanted = [2 * step for step in range(1, 1001)]
        if name == "Train_Samples_samples_per_sec":  # not of the first two steps of a process
            wanted = [step for step in wanted if step not in (2, 4, 1402, 1404)]
        assert seen == wanted, name


@on_ranks(2)
def test_a_load_takes_the_files_back_to_its_samples(rank, world, folder):
    """In one process, and with weights alone, which take nothing back."""
    engine = net_engine(world, 1, MICRO, **csv_section(folder))
    train(engine, rank, world, 2)
    engine.save_checkpoint(f"{folder}/saved")
    train(engine, rank, world, 2)
    engine.load_checkpoint(f"{folder}/saved", load_module_only=True)
    engine.monitor.flush()
    names = {name for name in read(folder)} if rank == 0 else set()
    deepspeed.comm.barrier()
    if rank == 0:
        assert all([step for step, _ in rows][-1] == 32 for rows in read(folder).values()) and len(names) == 4
    deepspeed.comm.barrier()
    engine.load_checkpoint(f"{folder}/saved")
    losses, _, _ = train(engine, rank, world, 1)
    engine.destroy()
    if rank == 0:
        found = read(folder)["Train_Samples_train_loss"]
        assert [step for step, _ in found] == [8, 16, 24] and found[-1][1] == pytest.approx(losses[0])
