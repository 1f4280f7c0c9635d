"""The end of a step: hooks run once for each, in plain engines and in pipelines, and in these behind the schedule."""

import os
import shutil
import signal

import pytest
import torch

import pipe_models as models
from deepspeed.pipe import schedule
from engine_models import config, loss_on, make_net
from harness import on_ranks, run_ranks
from memory_hosts import memory_hosts
from runs import engine_of, load_into, take_step
from test_memory_copies import enter

MICRO_BATCHES, STEPS, SIGNAL_AT = 2, 8, 2


def watch(engine):
    """A list of ``(hook, global steps, whether a schedule runs)``, which grows."""
    seen, running = [], []

    def counted(name, function):
        def hook(*args):
            seen.append((name, engine.global_steps, bool(running)))
            return function(*args)

        return hook

    engine._memory_copies.after_step = counted("copies", engine._memory_copies.after_step)
    engine._announced_end.after_step = counted("end", engine._announced_end.after_step)
    if hasattr(engine, "_exec_schedule"):
        run = engine._exec_schedule

        def exec_schedule(steps):
            running.append(True)
            try:
                run(steps)
            finally:
                running.pop()

        engine._exec_schedule = exec_schedule
    return seen


def pipeline(world, folder, stage):
    elasticity = {"memory_copies": 1, "snapshot_steps": 1, "save_on_signal": folder}
    return models.engine_of("plain", 2, world, MICRO_BATCHES, stage, elasticity=elasticity)


def ends(rank, world, hosts, folder, stage):
    enter(rank, world, hosts)
    engine = load_into(pipeline(world, folder, stage), folder)
    seen, code = watch(engine), None
    data = models.batches("plain", STEPS, MICRO_BATCHES, engine.grid.get_data_parallel_rank())
    for step in range(STEPS):
        if step == SIGNAL_AT and rank == world - 1:  # one rank alone hears of it
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            engine.train_batch(data)
        except SystemExit as end:
            code = end.code
            break
    steps, weights = engine.global_steps, models.parameters_of(engine)
    engine.destroy()
    return code, steps, seen, weights


def goes_on(rank, world, hosts, folder, stage):
    enter(rank, world, hosts)
    engine = pipeline(world, folder, stage)
    path, _ = engine.load_checkpoint(folder)
    found = path, engine.global_steps, models.parameters_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("world, stage", [(2, 0), pytest.param(4, 1, marks=pytest.mark.every("as (2, 0)"))])
def test_a_signal_and_copies_in_memory_behind_a_schedule(world, stage, tmp_path):
    folder, last = str(tmp_path / "run"), SIGNAL_AT + 2  # the others hear of it at the end of the next step
    hooks = [(name, step, False) for step in range(1, last + 1) for name in ("copies", "end")]
    with memory_hosts(1) as told:
        hosts = [told[0][0]]
        ended = run_ranks(world, ends, hosts, folder, stage, init=True)
        for code, steps, seen, _ in ended:
            assert (code, steps, seen) == (143, last, hooks)
        for place in (folder, hosts[0]["DS_MEMORY_FOLDER"]):
            resumed = run_ranks(world, goes_on, hosts, folder, stage, init=True)
            for (*_, weights), (path, steps, loaded) in zip(ended, resumed, strict=True):
                assert path.startswith(place) and steps == last and loaded.keys() == weights.keys()
                assert all(torch.equal(loaded[name], weights[name]) for name in weights)
            shutil.rmtree(folder, ignore_errors=True)  # now there is the copy in memory alone


@on_ranks(2, init=True)
def test_a_client_that_runs_schedules_itself(rank, world):
    """A client with a loop over schedules of its own."""
    engine = models.engine_of("plain", 2, world, MICRO_BATCHES)
    seen = watch(engine)
    engine.set_dataiterator(models.batches("plain", 3, MICRO_BATCHES, 0))
    for _ in range(3):
        engine._exec_schedule(schedule.TrainSchedule(MICRO_BATCHES, 2, engine.stage_id))
    expected = [(name, step) for step in (1, 2) for name in ("copies", "end")]  # those of step 3 are still to come
    assert [(name, step) for name, step, _ in seen] == expected


@on_ranks(1, init=True)
def test_a_plain_engine(rank, world):
    expected = [(name, step, False) for step in (1, 2) for name in ("copies", "end")]
    engine = engine_of(make_net(), config(world, 2))
    seen = watch(engine)
    for _ in range(4):
        take_step(engine, loss_on(engine, 0))
    assert seen == expected
