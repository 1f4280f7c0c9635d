"""The step log of a device that runs behind its host: for how long its stream waits for other ranks."""

import time

import pytest
import standin
import torch

import deepspeed
import fake_nccl
from harness import run_ranks
from models import two_layers
from runs import engine_of, settings, take_step, together

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")

DELAY = 0.3
STEPS = 4


def waited_as_told(mine, late, stage):
    """Whether one step's rows say that the rank that was on time, and it alone, waited for the other."""
    # At stage 3 the host reads from the device which parameters the other ranks want to gather.
    on_host = 0 if stage == 3 else mine["phases"]["communication"] + mine["phases"]["gathers"]
    return mine["stream_wait"] > 0.8 * DELAY > late["stream_wait"] >= 0 and on_host < 0.5 * DELAY


def train(rank, world, stage, log):
    """Rank 1's device is late in each backward, which its host does not notice. The rows of the log on all ranks, and
    the last report on them."""
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    standin.choose(1)
    engine = engine_of(two_layers(), settings(stage, steps_per_print=STEPS, step_log=log))

    def delay(grad):
        if rank == 1:
            standin.launch(lambda: time.sleep(DELAY), "late")

    engine.module[0].weight.register_hook(delay)
    x = torch.ones(2, 6, device=engine.device)
    for _ in range(STEPS):
        take_step(engine, engine(x).square().sum())
    found = together(engine.step_log()), engine._step_log.rank_times
    engine.destroy()
    assert standin.faults_at_end() == []
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_the_stream_waits_for_a_rank_whose_device_is_late(stage, tmp_path):
    variables = {"DS_STANDIN_NCCL": fake_nccl.build(tmp_path)}
    (rows, report), _ = run_ranks(2, train, stage, {}, init=True, fresh=True, env=variables)
    steps = list(zip(*rows))[1:]
    # A busy machine can hold up either rank in one step. A wrong log is wrong in each of them.
    assert any(waited_as_told(mine, late, stage) for mine, late in steps), steps
    for row in (row for step in steps for row in step):
        assert sum(row["phases"].values()) == pytest.approx(row["wall"], abs=1e-8)
    # The report names the rank that waited least: the late one, unless the machine held up the other for longer.
    waits = [sum(row["stream_wait"] for row in column) for column in rows]
    assert report["slowest_rank"] == 1 or waits[0] - waits[1] < 0.5 * DELAY


def test_no_events_are_recorded_while_the_log_is_off(tmp_path):
    variables = {"DS_STANDIN_NCCL": fake_nccl.build(tmp_path)}
    (rows, report), _ = run_ranks(2, train, 1, {"enabled": False}, init=True, fresh=True, env=variables)
    assert rows == [[], []] and report is None
