"""Elastic runs on pretended hosts whose ranks, agents and first host are killed: losses are those of an undisturbed
run."""

import json
import os
import pathlib
import tempfile
import time

import pytest

from engine_models import plain_net
from processes import wait_for
from test_elastic_training import HERE, start_job

KEPT = "/dev/shm/deepspeed-memory-"
SIZE = 12  # samples of a batch, which 1, 2, 3, 4 and 6 ranks can share
# Arguments: this folder, stage, steps, whether it is saved on disk, the section elasticity, events. An event of a
# round: [step, what, whom]. "rank": it dies; "hosts": their agents die, and nobody reaches them; "up": it is back.
SCRIPT = """
import json, os, signal, sys, time
tests, stage, steps, on_disk, section, events = map(json.loads, sys.argv[2:])
sys.path.insert(0, tests)
import torch
import deepspeed
from engine_models import elastic_step, make_net
engine = deepspeed.initialize(model=make_net(), config={
    "elasticity": {
        "enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2, 3], "version": 0.1, **section},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.05}},
    "gradient_clipping": 0.5, "zero_optimization": {"stage": stage, "reduce_bucket_size": 300}})[0]
path, _ = engine.load_checkpoint("saved")
rank, world, restart = engine.global_rank, engine.world_size, os.environ["TORCHELASTIC_RESTART_COUNT"]
host, down = os.environ["STAND_IN"], "log.down."
if os.environ["LOCAL_RANK"] == "0":
    with open("agent-" + host, "w") as file:
        file.write(open("/proc/%d/stat" % os.getppid()).read().rsplit(")", 1)[1].split()[1])
if rank == 0:
    with open("rounds", "a") as file:
        file.write(json.dumps([int(restart), world, engine.global_steps, path]) + "\\n")
slow = 0
while engine.global_steps < steps:
    step = engine.global_steps
    mean = elastic_step(engine, 12)
    if rank == 0:
        with open("losses", "a") as file:
            file.write(json.dumps([step, mean.item(), time.time()]) + "\\n")
    at, what, whom = events.get(restart, [None, None, None])
    if at == step:
        if world > 1:
            torch.distributed.barrier()  # everyone has its step
        if what == "rank" and rank == whom:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hosts" and host in whom:
            if host == whom[0] and os.environ["LOCAL_RANK"] == "0":
                for one in whom:
                    open(down + one, "w").close()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # when one is lost the ranks of the others end
                for one in reversed(whom):
                    os.kill(int(open("agent-" + one).read()), signal.SIGKILL)
            time.sleep(60)  # until the supervisor ends it
        if what == "up" and rank == 0:
            os.unlink(down + whom)
            while not os.path.exists("come-" + whom):
                time.sleep(0.05)
        slow = 0 if what != "up" else 60 if on_disk else 2  # until the ranks start again behind what is saved
    if on_disk:
        engine.save_checkpoint("saved")
    time.sleep(slow)
"""


@pytest.fixture
def folder(monkeypatch):
    """In memory: a disk may be slow while others use it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        monkeypatch.chdir(made)
        yield pathlib.Path(made)


def run(folder, hosts, stage, steps, on_disk, section, events):
    """Runs the job; returns ``[[restart, ranks, step it began with, path it came from], ...]`` and what the launcher
    said. Losses are compared."""
    told = [json.dumps(one) for one in (HERE, stage, steps, on_disk, section, events)]
    job = start_job(folder, hosts, SCRIPT, *told)
    try:
        limit = time.monotonic() + 300
        while job.poll() is None and time.monotonic() < limit:
            for host in (line.split()[0] for line in hosts.splitlines()):
                if f"host {host} is here" in (folder / "said").read_text():
                    (folder / f"come-{host}").touch()
            time.sleep(0.1)
        said = (folder / "said").read_text()
        assert job.poll() == 0, said
    finally:
        job.kill()
        job.wait()
    rounds = [json.loads(line) for line in (folder / "rounds").read_text().splitlines()]
    kept = {path.split("/step")[0] for *_, path in rounds if path and path.startswith(KEPT)}
    wait_for(lambda: not any(map(os.path.exists, kept)), 20)  # the agents have removed their memory
    losses = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    expected = plain_net(steps, size=SIZE).means
    for step, loss, _ in losses:
        assert abs(loss - float(expected[step])) < 1e-5, (step, said)
    assert {step for step, *_ in losses} == set(range(steps))
    return rounds, said


MEMORY = {"memory_copies": 1, "snapshot_steps": 2}


def test_a_lost_host_costs_no_more_than_the_steps_since_the_last_snapshot(folder):
    """Nothing is saved on disk; the memory of the lost host is gone with it."""
    rounds, said = run(folder, "ha slots=1\nhb slots=1\n", 2, 7, False, MEMORY, {"0": [4, "hosts", ["hb"]]})
    assert [row[:2] for row in rounds] == [[0, 2], [1, 1]] and rounds[1][2] in (2, 4), said
    assert rounds[1][3].startswith(KEPT) and "takes the snapshot step" in said


EVERY = pytest.mark.every("twenty starts of ranks; one lost host is in make test")
FIRST_HOST = {"0": [2, "hosts", ["hb", "hc"]], "1": [4, "up", "hb"], "2": [6, "up", "hc"], "3": [8, "rank", 1]}


@EVERY
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_four_two_three_four_ranks_and_the_first_host_goes(folder, stage):
    events = {**FIRST_HOST, "4": [10, "hosts", ["ha"]]}
    rounds, said = run(folder, "ha slots=2\nhb slots=1\nhc slots=1\n", stage, 12, True, {}, events)
    assert [row[1] for row in rounds] == [4, 2, 3, 4, 4, 2], said


@EVERY
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_carries_a_run_at_the_same_and_at_other_numbers_of_ranks(folder, stage):
    events = {"0": [3, "rank", 3], "1": [6, "hosts", ["hb"]], "2": [9, "up", "hb"], "3": [14, "hosts", ["ha"]]}
    rounds, said = run(folder, "ha slots=2\nhb slots=2\n", stage, 17, False, MEMORY, events)
    assert [row[1] for row in rounds] == [4, 4, 2, 4, 2], said
    assert rounds[1][2] >= 2 and rounds[2][2] >= 4 and rounds[4][2] >= 12, said
    assert all(path.startswith(KEPT) for *_, path in rounds[1:])
