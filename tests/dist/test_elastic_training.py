"""Training that goes on: behind SIGTERM from where it was saved, and at another number of ranks when a host is lost."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
import torch

import deepspeed
import stand_ins
from engine_models import config, loss_on, make_net, plain_net
from harness import on_ranks, run_ranks
from processes import wait_for
from runs import raised
from sampling import every_case

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.fixture
def memory():
    """A folder whose files are on no disk, which may be slow while others use it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield pathlib.Path(folder)


def _ended_by_sigterm():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"up")
        for _ in range(3000):  # a signal just before a long sleep would be heard at its end
            time.sleep(0.01)
        os._exit(0)
    os.read(read, 2)
    os.close(read)
    os.close(write)
    os.kill(child, signal.SIGTERM)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def saves_on_signal(rank, world, folder, more):
    before = signal.getsignal(signal.SIGTERM)

    def made():
        return deepspeed.initialize(
            model=make_net(), config=config(world, elasticity={"save_on_signal": folder}, **more)
        )

    engine = made()[0]
    engine.set_signal_client_state(lambda: {"at": engine.global_steps})
    forked = _ended_by_sigterm()  # workers of a data loader, for example
    code = None
    for step in range(8):
        engine.backward(loss_on(engine, step, rank=rank, world=world))
        if step == 2 and rank == world - 1:  # one rank alone hears of it
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            engine.step()
        except SystemExit as end:
            code = end.code
            break
    steps, weight = engine.global_steps, engine.module.out.weight.detach().clone()
    engine.destroy()
    again = made()[0]
    _, state = again.load_checkpoint(folder)
    same = torch.equal(weight, again.module.out.weight)
    again.destroy()
    return code, steps, state["at"], again.global_steps, same, forked, signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("world, more", [(2, {}), (1, {"checkpoint": {"async": True}})])
def test_sigterm_saves_behind_the_same_step_on_all_ranks(memory, world, more):
    at = 4 if world > 1 else 3  # the others hear of it at the end of the next step
    found = run_ranks(world, saves_on_signal, str(memory / "saved"), more, init=True)
    assert found == [(143, at, at, at, True, signal.SIGTERM, True)] * world


@on_ranks(1)
def test_an_engine_of_another_thread_cannot_hear_of_signals(rank, world, folder):
    given, made = {"model": make_net(), "config": config(elasticity={"save_on_signal": folder})}, []
    thread = threading.Thread(target=lambda: made.append(raised(deepspeed.initialize, **given)))
    thread.start()
    thread.join()
    ((_, said),) = made
    assert said.startswith("elasticity.save_on_signal: signals reach the main thread alone")


def start_job(folder, hosts, script, *args, **more):
    """Starts an elastic job in a folder, which is the current one; what it says goes to the file ``said``. ``more``:
    variables."""
    stand_ins.install(folder / "bin")
    (folder / "hosts").write_text(hosts)
    (folder / "train.py").write_text(script)
    left_out = ("RANK", "WORLD_SIZE", "MASTER_PORT", "DS_LAUNCHER_SOCKET", "DS_LOG_LEVEL")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"PATH": f"{folder}/bin:{env['PATH']}", "STAND_IN_LOG": str(folder / "log"), "DS_ACCELERATOR": "cpu"}
    env |= {"PYTHONPATH": os.path.join(HERE, "..", "..", "python"), "OMP_NUM_THREADS": "1", "DS_ELASTIC_RETRY_S": "0.5"}
    env |= {"DS_ELASTIC_WARM_S": "1" if every_case() else "-1", **more}
    line = [sys.executable, "-m", "deepspeed.launcher", "--elastic_training", "-H", "hosts", "train.py", *args]
    with open("said", "wb") as said:
        return subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said)


SCRIPT = """
import json, os, signal, sys, time
sys.path.insert(0, sys.argv[-2])
import deepspeed
from engine_models import elastic_step, make_net
stage, steps, events = int(sys.argv[-3]), 7, json.loads(sys.argv[-1])
engine = deepspeed.initialize(model=make_net(), config={
    "elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2, 4], "version": 0.1},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.05}},
    "gradient_clipping": 0.5, "zero_optimization": {"stage": stage, "reduce_bucket_size": 300}})[0]
engine.load_checkpoint("saved")
rank, world, restart = engine.global_rank, engine.world_size, os.environ["TORCHELASTIC_RESTART_COUNT"]
print("round", restart, "world", world, "from step", engine.global_steps, flush=True)
while engine.global_steps < steps:
    step = engine.global_steps
    mean = elastic_step(engine)
    if rank == 0:
        with open("losses", "a") as file:
            file.write(json.dumps([int(restart), world, step, mean.item()]) + "\\n")
    event = events.get(restart)
    if event and event[0] == step:
        if event[1] == "agent" and rank == world - 1:
            os.kill(int(open("/proc/%d/stat" % os.getppid()).read().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
            time.sleep(60)  # until the supervisor ends it: this step is not saved
        if event[1] == "rank" and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while event[1] == "wait" and not os.path.exists("come"):
            time.sleep(0.05)
    engine.save_checkpoint("saved")
"""


def test_losses_are_those_of_an_undisturbed_run(memory, monkeypatch):
    """Two ranks on two hosts; the agent of the second is killed, then that host comes back; then a rank is killed."""
    monkeypatch.chdir(memory)
    events, more = {"0": [2, "agent"]}, {"DS_ELASTIC_RETRY_S": "600"}  # the host stays away
    if every_case():
        events, more = {**events, "1": [3, "wait"], "2": [5, "rank"]}, {}
    job = start_job(memory, "ha slots=1\nhb slots=1\n", SCRIPT, "1", HERE, json.dumps(events), **more)

    def text():
        return (memory / "said").read_text()

    try:
        if every_case():
            wait_for(lambda: "host hb is here" in text() or job.poll() is not None, 120)
            (memory / "come").write_text("")
        assert job.wait(180) == 0, text()
    finally:
        job.kill()
    rows = [json.loads(line) for line in (memory / "losses").read_text().splitlines()]
    worlds = {restart: world for restart, world, _, _ in rows}
    assert worlds == ({0: 2, 1: 1, 2: 2, 3: 2} if every_case() else {0: 2, 1: 1}), text()
    assert [row[2] for row in rows if row[0] == 1][0] == 2  # from the newest checkpoint: step 2 was not saved
    expected = plain_net(7).means
    for _, _, step, loss in rows:
        assert abs(loss - float(expected[step])) < 1e-5
    assert {row[2] for row in rows} == set(range(7))
