"""Jobs on hosts with an sshd of their own: real ssh and pdsh, real networks, a real cable that is cut."""

import contextlib
import importlib.util
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from processes import wait_for
from sampling import every_case

HERE = os.path.dirname(os.path.abspath(__file__))
PYTHON_DIR = os.path.join(HERE, "..", "..", "python")
_spec = importlib.util.spec_from_file_location("pretended_hosts", os.path.join(HERE, "pretended_hosts.py"))
pretended_hosts = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pretended_hosts)

WHY_NOT = pretended_hosts.why_not()
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")]

SAMPLE = ("test_ranks_of_two_hosts_train", "test_a_failing_rank_on_the_second_host")
TRAIN = """
import os, torch, deepspeed
deepspeed.init_distributed()
model = torch.nn.Linear(4, 4)
config = {"train_batch_size": 6, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}
engine = deepspeed.initialize(model=model, config=config)[0]
torch.manual_seed(int(os.environ["RANK"]))
for _ in range(2):
    engine.backward(engine(torch.randn(2, 4)).square().sum())
    engine.step()
total = sum(float(p.detach().double().sum()) for p in model.parameters())
print("sum %.9f on" % total, os.uname().nodename, flush=True)
"""
GOES_ON = """
import os, time, torch, deepspeed
section = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2, 3], "version": 0.1}
engine = deepspeed.initialize(model=torch.nn.Linear(4, 4), config={
    "elasticity": {**section, "memory_copies": 1, "snapshot_steps": 2}, "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})[0]
path, _ = engine.load_checkpoint("saved")
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
if engine.global_rank == 0: print("began", restart, engine.world_size, engine.global_steps, path, flush=True)
while engine.global_steps < 9:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).square().sum())
        engine.step()
    if restart == "0" and engine.global_steps == 7:
        engine._memory_copies.snapshots._behind.drain()  # that of step 6 is on the next host, too
        open("here%d" % engine.global_rank, "w").close()
        time.sleep(600)
"""
SLEEP = """
import os, sys, time
rank = int(os.environ["RANK"])
open("here%d.part" % rank, "w").write(str(os.getpid())); os.rename("here%d.part" % rank, "here%d" % rank)
while not all(os.path.exists("here%d" % one) for one in range(3)): time.sleep(0.02)
if os.environ.get("DS_FAIL") == str(rank): print("last words", file=sys.stderr); sys.exit(37)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster():
    with pretended_hosts.PretendedHosts() as made:
        yield made


@pytest.fixture(autouse=True)
def folder(request, monkeypatch):
    in_sample = request.node.originalname in SAMPLE and "pdsh" not in request.node.name
    if not in_sample and not every_case() and not os.environ.get("DS_TEST_CLUSTER"):
        pytest.skip("not in the sample: make test-cluster runs it")
    made = pathlib.Path(tempfile.mkdtemp(dir=request.getfixturevalue("cluster").folder))  # all hosts see it
    monkeypatch.chdir(made)
    (made / "hosts").write_text("h1 slots=2\nh2 slots=1\n")
    return made


def start(cluster, launcher, *args, **more):
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    env |= {"PYTHONPATH": PYTHON_DIR, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0", **more}
    options = f"-F {cluster.path('ssh_config')}"
    reach = ["--launcher", launcher]
    if launcher == "ssh":
        reach.append(f"--launcher_args={options}")
    else:
        env["PDSH_SSH_ARGS_APPEND"] = options
    line = [sys.executable, "-m", "deepspeed.launcher", "-H", "hosts", *reach, *map(str, args)]
    return subprocess.Popen(
        cluster.on_head(*line), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def ended(job, timeout=90):
    out, errors = job.communicate(timeout=timeout)
    return job.returncode, out.decode(errors="replace"), errors.decode(errors="replace")


def ends_clean(cluster, seconds=10):
    """Waits until no process and no file of a job is left on any host."""

    def left():
        return [one for name in ("h1", "h2") for one in (*cluster.processes(name), *cluster.left(name))]

    with contextlib.suppress(AssertionError):
        wait_for(lambda: not left(), seconds)
    assert left() == []


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_ranks_of_two_hosts_train(cluster, launcher, folder):
    (folder / "train.py").write_text(TRAIN)
    code, out, errors = ended(start(cluster, launcher, "train.py"))
    assert code == 0, errors
    lines = sorted(line for line in out.splitlines() if "] sum " in line)
    assert [line.split("]")[0] for line in lines] == ["[h1:0", "[h1:1", "[h2:2"]
    assert [line.split()[-1] for line in lines] == ["h1", "h1", "h2"]
    assert len({line.split()[2] for line in lines}) == 1


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_values_and_arguments_arrive_byte_for_byte(cluster, launcher, folder):
    numbers = random.Random(7)
    words = [bytes(numbers.choice(range(1, 256)) for _ in range(numbers.randint(1, 40))) for _ in range(1000)]
    (folder / "train.py").write_text("""
import os, sys
open("got" + os.environ["RANK"], "wb").write(
    b"\\0".join([*map(os.fsencode, sys.argv[2:]), *[os.environb[b"DS_TEST_%d" % i] for i in range(1000)]]))
""")
    more = {f"DS_TEST_{i}": os.fsdecode(word) for i, word in enumerate(words)}
    code, _, errors = ended(start(cluster, launcher, "train.py", *map(os.fsdecode, words), **more))
    assert code == 0, errors
    for rank in range(3):
        assert (folder / f"got{rank}").read_bytes().split(b"\0") == words * 2


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_a_failing_rank_on_the_second_host(cluster, launcher, folder):
    (folder / "train.py").write_text(SLEEP)
    code, _, errors = ended(start(cluster, launcher, "train.py", DS_FAIL="2"))
    assert code == 37 and "rank 2 of 3 (pid " in errors and "host h2) failed" in errors and "last words" in errors
    ends_clean(cluster, 5)


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_ctrl_c(cluster, launcher, folder):
    (folder / "train.py").write_text(SLEEP)
    job = start(cluster, launcher, "train.py")
    wait_for(lambda: all(os.path.exists(f"here{rank}") for rank in range(3)), 30)
    job.send_signal(signal.SIGINT)
    assert ended(job)[0] == 130
    ends_clean(cluster, 5)


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_a_cable_that_is_cut(cluster, launcher, folder):
    (folder / "train.py").write_text(SLEEP)
    job = start(cluster, launcher, "train.py")
    wait_for(lambda: all(os.path.exists(f"here{rank}") for rank in range(3)), 30)
    cluster.cut("h2")
    try:
        ends_clean(cluster)
        wait_for(lambda: job.poll() is not None, 5)
        code, _, errors = ended(job)
    finally:
        cluster.mend("h2")
    assert code == 1 and "host h2 was lost" in errors


@pytest.mark.parametrize("lost, how, world", [("h2", "cable", "2"), ("h1", "agent", "1")])
def test_an_elastic_run_goes_on_from_the_memory_of_the_other_host(cluster, folder, lost, how, world):
    """What the lost host had in its own /dev/shm has come to the other one over the network. Any host may be lost,
    that of rank 0, too: the head, where the job was started, is on none of them."""
    (folder / "train.py").write_text(GOES_ON)
    job = start(cluster, "ssh", "--elastic_training", "train.py", DS_ELASTIC_RETRY_S="600")
    wait_for(lambda: all(os.path.exists(f"here{rank}") for rank in range(3)), 60)
    if how == "cable":
        cluster.cut(lost)
    else:
        cluster.kill(lost, "deepspeed.launcher.agent")
    try:
        code, out, errors = ended(job)
        ends_clean(cluster)
    finally:
        cluster.mend(lost)
    assert code == 0 and f"host {lost} was lost" in errors, errors
    began = [line.split()[1:] for line in out.splitlines() if "began" in line]
    assert began[0][1:5] == ["0", "3", "0", "None"] and began[1][1:4] == ["1", world, "6"], out
    assert began[1][4].startswith("/dev/shm/deepspeed-memory-"), out


def test_the_end_of_the_head_is_the_end_of_an_elastic_job(cluster, folder):
    (folder / "train.py").write_text(SLEEP)
    job = start(cluster, "ssh", "--elastic_training", "train.py")
    wait_for(lambda: all(os.path.exists(f"here{rank}") for rank in range(3)), 30)
    job.kill()
    ended(job)
    ends_clean(cluster)


def test_check(cluster, folder):
    (folder / "train.py").write_text("")
    code, out, errors = ended(start(cluster, "ssh", "--check", "train.py"))
    assert code == 0 and " MB/s to h1" in out and "A job of 3 ranks on 2 host(s) can start." in out, errors


def test_time_to_the_script(cluster, folder):
    """Over ssh a script starts 0.3 s after a plain login; here with room for a busy machine."""
    (folder / "train.py").write_text("import time; print('at', time.time())")
    (folder / "hosts").write_text("h1 slots=1\n")
    plain, ours = [], []
    for _ in range(3):
        start_s = time.time()
        line = cluster.on_head("ssh", "-F", cluster.path("ssh_config"), "h1", f"{sys.executable} -S -c 'pass'")
        subprocess.run(line, check=True)
        plain.append(time.time() - start_s)
        start_s = time.time()
        code, out, errors = ended(start(cluster, "ssh", "train.py"))
        assert code == 0, errors
        ours.append(float(out.split()[-1]) - start_s)
    figures = {"plain login": min(plain), "to the script": min(ours)}
    print(json.dumps(figures))
    assert figures["to the script"] < figures["plain login"] + 1.5
