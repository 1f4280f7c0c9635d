"""The log of steps: where the wall time goes, in any engine and on several ranks; the timers of a breakdown."""

import gc
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from unittest import mock

import pytest
import torch

import pipe_models
from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.comm import mesh_views
from deepspeed.comm.timed import call_log
from deepspeed.engine import pipeline_engine
from deepspeed.profiling.phases import PHASES
from engine_models import net_engine, train_engine
from harness import on_ranks
from injected_delays import DELAY, LateLink, build_late_reads
from models import two_layers
from processes import succeeded
from runs import engine_of, identical, raised, settings, take_step, together, weights
from runs import train as train_steps


def nobody_listens():
    gc.collect()  # engines of other tests
    return not call_log.on


def check_sums(rows):
    """The phases of a step are its wall time."""
    assert rows
    for row in rows:
        assert tuple(row["phases"]) == PHASES and min(row["phases"].values()) >= 0
        assert sum(row["phases"].values()) == pytest.approx(row["wall"], abs=1e-8)
        assert row["stream_wait"] is None  # the CPU has no streams


def check_wall(engine, step, steps):
    """Takes steps. The phases of all but the first are the time between the moments at which the log ends them. Each of
    these lies between two looks at the clock."""
    times, starts, ends = engine._step_log.times, [], []
    take = times.take
    times.take = lambda: (starts.append(time.perf_counter()), take(), ends.append(time.perf_counter()))[1]
    for number in range(steps):
        step(number)
    rows = engine.step_log()
    assert len(ends) == len(rows) == steps
    check_sums(rows)
    spent = sum(sum(row["phases"].values()) for row in rows[1:])
    assert starts[-1] - ends[0] - 1e-6 <= spent <= ends[-1] - starts[0] + 1e-6
    return rows


@pytest.mark.parametrize(
    "world, stage, zero",
    [
        (1, 0, {}),
        (1, 3, {}),
        (2, 0, {}),
        (2, 1, {}),
        (2, 2, {"offload_optimizer": {"device": "cpu"}}),
        (2, 3, {"stage3_param_persistence_threshold": 0}),
    ],
)
@on_ranks(init=True)
def test_the_phases_of_a_step_are_its_wall_time(rank, world, stage, zero):
    engine = net_engine(world, stage, accumulate=2, zero=zero)
    rows = check_wall(engine, lambda step: train_engine(engine, 1, rank, world, start=step), 4)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[-1]["samples"] == engine.global_samples
    assert all(row["phases"][name] > 0 for row in rows for name in ("forward", "backward", "optimizer"))
    if world > 1:
        assert all(row["phases"]["communication"] > 0 for row in rows)
        assert all(row["phases"]["gathers"] > 0 for row in rows) or stage == 0
    row = rows[-1]
    assert row["grad_norm"] == pytest.approx(engine.get_global_grad_norm()) and row["lr"] == engine.get_lr()[0]
    assert row["loss"] > 0 and row["loss_scale"] == 1.0 and not row["skipped"] and row["mfu"] is None
    assert row["tokens_per_sec"] == pytest.approx(6 * row["samples_per_sec"])
    memory = row["memory"]
    assert memory["states"] > 0 and memory["peak"] > 0 and (memory["gathered"] > 0) == (stage == 3 and not zero)
    engine.destroy()
    assert nobody_listens()


@on_ranks(2, init=True)
def test_a_pipeline(rank, world):
    engine = pipe_models.engine_of("plain", 2, world, 4, steps_per_print=2, wall_clock_breakdown=True)
    data = pipe_models.batches("plain", 4, 4, 0)
    with mock.patch.object(pipeline_engine, "log_dist") as log:
        losses = []
        rows = check_wall(engine, lambda step: losses.append(engine.train_batch(data)), 4)
    lines = [call.args[0] for call in log.call_args_list if call.args[0].startswith("steps: ")]
    form = r"steps: (\d) loss: [\d.]+ iter time \(s\): ([\d.]+) samples/sec: ([\d.]+)"
    told = [re.fullmatch(form, line).groups() for line in lines]
    assert [step for step, *_ in told] == ["2", "4"]
    for _, seconds, samples in told:
        assert float(seconds) * float(samples) == pytest.approx(engine.train_batch_size(), rel=0.3)
    assert {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"} <= set(engine.get_wall_clock_timers())
    assert len(rows) == 4 and rows[-1]["loss"] == pytest.approx(losses[-1].item())
    assert all(row["phases"][name] > 0 for row in rows for name in ("data", "forward", "backward", "communication"))
    engine.destroy()


@pytest.mark.parametrize("where", ["loader", "rank"])
@on_ranks(2, init=True)
def test_the_cause_of_a_slow_step_is_in_its_phase_and_rank(rank, world, where):
    """Rank 1 is late by what is injected. Load of the machine may add to any time."""

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if where == "loader" and rank == 1:
                time.sleep(DELAY / 2)  # of the two samples of a batch
            return torch.ones(6)

    made = settings(1, rows=2, steps_per_print=3)
    engine = engine_of(two_layers(), made)
    loader = engine.deepspeed_io(Data(), num_local_io_workers=0)
    late = [0.0]
    engine.module[0].weight.register_hook(lambda grad: time.sleep(late[0]))
    batches = iter(loader)
    for _ in range(3):
        late[0] = DELAY if where == "rank" and rank == 1 else 0.0
        take_step(engine, engine(next(batches)).square().sum())
    rows = engine.step_log()
    check_sums(rows)
    phase, report = {"loader": "data", "rank": "backward"}[where], engine._step_log.rank_times
    for mine, other in zip(*together([row["phases"] for row in rows])[::-1]):
        assert mine[phase] >= DELAY and other[phase] < mine[phase]
        # The other rank waits for what is left when its own work is done.
        assert other["communication"] + other["gathers"] > 0
    assert report["slowest_rank"] == 1 and report["slowest_phase"] == phase and report["step"] == 3
    assert report["max"][phase] >= DELAY
    waits = together([row["phases"]["communication"] + row["phases"]["gathers"] for row in rows])
    assert max(waits[0]) > 0.8 * DELAY
    engine.destroy()


@on_ranks(2, init=True)
def test_a_late_message_is_communication(rank, world):
    with LateLink() as link:
        engine = engine_of(two_layers(), settings(1))
        for step in range(4):
            link.late = rank == 1 and step % 2 == 1
            take_step(engine, engine(torch.ones(2, 6)).square().sum())
    rows = engine.step_log()
    check_sums(rows)
    waits = [row["phases"]["communication"] for row in rows]
    assert rank == 0 or (min(waits[1::2]) >= DELAY > min(waits[::2])), rows
    engine.destroy()


READS = """
    import json, os, sys
    import torch
    from injected_delays import LateReads
    from models import two_layers
    from runs import engine_of, settings, take_step

    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": sys.argv[1]}}
    engine, reads = engine_of(two_layers(), settings(1, zero=zero)), LateReads()
    for step in range(4):
        reads.late = step % 2
        take_step(engine, engine(torch.ones(2, 6)).square().sum())
    assert reads.late == 0
    print(json.dumps([row["phases"] for row in engine.step_log()]))
"""


def test_a_late_read_of_states_is_offload(tmp_path):
    library = build_late_reads(tmp_path)
    if library is None:
        pytest.skip("no C compiler to build a library for late reads with")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "LD_PRELOAD": library}
    command = [sys.executable, "-c", textwrap.dedent(READS), str(tmp_path)]
    done = succeeded(subprocess.run(command, env=env, capture_output=True, text=True, timeout=60))
    waits = [phases["offload"] for phases in json.loads(done.stdout.splitlines()[-1])]
    assert min(waits[1::2]) >= DELAY > min(waits[::2]), waits


@on_ranks(2, init=True)
def test_each_engine_counts_its_own_waits(rank, world):
    """A call that is made in a phase of one engine is no wait of the others of the process, whose steps go on."""
    clocks = [_native._C.StepClock(), _native._C.StepClock()]
    waits = [_native._C.StepWaits(clock, "cpu") for clock in clocks]
    everyone = mesh_views.adopted_by_all()

    def counted():
        before = [clock.totals()[3] for clock in clocks]
        everyone.run("all_reduce", output=torch.ones(2)).wait()
        return [clock.totals()[3] > count for clock, count in zip(clocks, before)]

    for clock, one in zip(clocks, waits):
        clock.turn(True)
        call_log.add(one)
    assert counted() == [True, True]  # of no engine
    forward = clocks[0].enter("forward")
    assert counted() == [True, False]
    clocks[0].enter("gathers")
    assert counted() == [False, False]  # a part of the wait for parameters
    clocks[0].leave(forward)
    backward = clocks[1].enter("backward")
    assert counted() == [False, True]
    clocks[1].leave(backward)
    assert counted() == [True, True]
    for one in waits:
        call_log.remove(one)
    assert counted() == [False, False]
    assert [one.take() for one in waits] == [None, None]
    assert raised(clocks[0].enter, "lunch") == ("ValueError", "a step has no phase 'lunch'")


@on_ranks(2, init=True)
def test_the_file(rank, world, folder):
    path = os.path.join(folder, "made", "here", "run.jsonl")
    dist.barrier()
    log = {"file": path, "peak_tflops": 2.0}
    engine = net_engine(world, 2, step_log=log, steps_per_print=2)
    train_engine(engine, 4, rank, world)
    engine.save_checkpoint(os.path.join(folder, "saved"))
    train_engine(engine, 1, rank, world)
    kept = engine.step_log()
    engine.destroy()
    if rank == 0:
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        assert [line["kind"] for line in lines] == ["run", "step", "step", "ranks", "step", "step", "ranks", "step"]
        run = lines[0]
        assert run["version"] == 1 and run["world_size"] == 2 and run["ranks"] == [os.uname().nodename] * 2
        assert run["config_changed"]["step_log.file"] == path and run["config_changed"]["train_batch_size"] == 8
        assert run["config"]["zero_optimization"]["stage"] == 2 and abs(run["start"] - time.time()) < 600
        assert [line for line in lines if line["kind"] == "step"] == kept
        assert {"min", "max", "slowest_rank", "slowest_phase", "host"} < set(lines[3])
    assert kept[0]["mfu"] is None and all(row["mfu"] > 0 for row in kept[1:])
    flops = [row["mfu"] * row["wall"] * 2e12 for row in kept[1:]]
    assert flops == pytest.approx([flops[0]] * 4)
    assert kept[4]["phases"]["checkpoint"] > 0
    check_sums(kept)


@on_ranks(2, init=True)
def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(rank, world, folder):
    path = os.path.join(folder, "file")
    with open(path, "w", encoding="utf-8"):
        pass
    kind, text = raised(net_engine, world, step_log={"file": os.path.join(path, "run.jsonl")})
    assert kind == "ValueError" and text.startswith("rank 0: step_log.file: ") and "leave it out" in text


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2, init=True)
def test_all_off(rank, world, stage):
    """Nothing is replaced and nothing stays; the log changes no bit."""
    modules = (torch, torch.nn.functional, torch.distributed)
    before = {(module.__name__, name): value for module in modules for name, value in vars(module).items()}
    found = []
    assert nobody_listens()
    for enabled in (True, False):
        engine = net_engine(world, stage, step_log={"enabled": enabled})
        assert call_log.on is enabled and not call_log.waits
        train_engine(engine, 20, rank, world)
        assert len(engine.step_log()) == 20 * enabled
        found.append(weights(engine))
        engine.destroy()
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        assert not any(getattr(module, name) for module in engine.module.modules() for name in hooks)
        assert not call_log.on
    for module in modules:
        for name, value in vars(module).items():
            assert (module.__name__, name) not in before or before[module.__name__, name] is value
    for name, value in found[0].items():
        assert identical(value, found[1][name]), name


@on_ranks(2, init=True)
def test_the_parts_of_a_backward(rank, world):
    """``bwd`` is ``bwd_inner`` and ``bwd_allreduce``; the wait for a rank that is late is in the latter."""
    engine = engine_of(two_layers(), settings(2, wall_clock_breakdown=True))
    late = 6 * DELAY  # more than a busy machine adds
    engine.module[0].weight.register_hook(lambda grad: time.sleep(late * rank))
    log = engine.progress.timers
    kept = []
    log.log = lambda names, **more: kept.append({name: log(name).elapsed() for name in names})
    train_steps(engine, lambda *_: engine(torch.ones(2, 6)).square().sum(), 2)
    names = ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"]
    assert [list(row) for row in kept] == [[f"{name}_microstep" for name in names], names] * 2
    for row in kept[1::2]:
        assert row["bwd_inner"] + row["bwd_allreduce"] == pytest.approx(row["bwd"], abs=1e-6)
        assert (row["bwd_allreduce"] if rank == 0 else row["bwd_inner"]) > 0.8 * late * 1e3
    engine.destroy()
