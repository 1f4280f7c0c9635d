"""Jobs that tests start on the head of pretended hosts, by each launcher, and what is left of them."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import stand_in_mpirun
from pretended_hosts import NAMES
from processes import wait_for

HERE = os.path.dirname(os.path.abspath(__file__))
PYTHON_DIR = os.path.join(HERE, "..", "..", "python")
EQUAL = ("impi", "mvapich")  # these want as many ranks on each host
MPI = ("openmpi", "mpich", *EQUAL)
LAUNCHERS = ("ssh", "pdsh", "slurm", *MPI)
_MPIRUN = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}  # Debian's names; both may be installed
_LEFT_OUT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_LOG_LEVEL", "OMP_NUM_THREADS")

# Ranks say what they found in one write: lines of others do not get into it.
TRAIN = """
import os, torch, deepspeed
deepspeed.init_distributed()
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "zero_optimization": {"stage": 2}}
engine = deepspeed.initialize(model=model, config=config)[0]
torch.manual_seed(int(os.environ["RANK"]))
for _ in range(2):
    engine.backward(engine(torch.randn(2, 4)).square().sum())
    engine.step()
total = sum(float(p.detach().double().sum()) for p in model.parameters())
place = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")]
os.write(1, ("sum %.9f on %s %s\\n" % (total, os.uname().nodename, " ".join(place))).encode())
"""
INIT = """
import os, torch, deepspeed
from deepspeed import comm as dist
dist.init_distributed()
one = torch.ones(1)
dist.all_reduce(one)
place = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")]
assert one.item() == int(place[2])
os.write(1, ("place %s %s\\n" % (os.uname().nodename, " ".join(place))).encode())
"""
SLEEP = """
import os, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
open("here%d.part" % rank, "w").write(str(os.getpid())); os.rename("here%d.part" % rank, "here%d" % rank)
while not all(os.path.exists("here%d" % one) for one in range(world)): time.sleep(0.02)
if os.environ.get("DS_FAIL") == str(rank): print("last words", file=sys.stderr); sys.exit(37)
time.sleep(600)
"""


def why_not(launcher):
    """An empty text where the programs of ``launcher`` are installed, else the reason."""
    program = {**_MPIRUN, "pdsh": "pdsh"}.get(launcher)
    return f"{program} not installed: tools/packages.sh cluster" if program and not shutil.which(program) else ""


def write_hosts(folder, launcher):
    """Two ranks on ``h1`` and one on ``h2``, or two on each where the launcher wants that; returns the number."""
    equal = launcher in EQUAL
    (folder / "hosts").write_text(f"h1 slots=2\nh2 slots={1 + equal}\n")
    return 3 + equal


def stand_ins(cluster):
    """A folder with the stand-in for ``mpirun`` and what else those MPIs have."""
    folder = cluster.path("bin")
    if not os.path.isdir(folder):
        os.mkdir(folder)
        write_program(f"{folder}/mpirun", f'exec {sys.executable} {stand_in_mpirun.__file__} "$@"')
        write_program(f"{folder}/mpiname", "echo MVAPICH2 2.3.7")
    return folder


def write_program(path, line):
    """A shell script of one line."""
    pathlib.Path(path).write_text(f"#!/bin/sh\n{line}\n")
    os.chmod(path, 0o755)


def variables(**more):
    """The environment in which a job is started."""
    env = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    return {**env, "PYTHONPATH": PYTHON_DIR, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0", **more}


def popen(command, env):
    """``command``, whose Ctrl-C does something, also where pytest runs in the background."""
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def start(cluster, launcher, script, *options, given=(), **more):
    """Starts the program ``deepspeed`` on the head with the file ``hosts`` of this folder, where it writes the script;
    returns the process. ``given``: arguments of the script."""
    pathlib.Path("train.py").write_text(script)
    env, reach = variables(**more), ["--launcher", launcher]
    of_ssh = f"-F {cluster.path('ssh_config')}"
    if launcher == "ssh":
        reach.append(f"--launcher_args={of_ssh}")
    elif launcher == "pdsh":
        env["PDSH_SSH_ARGS_APPEND"] = of_ssh
    elif launcher == "openmpi":
        reach.append("--launcher_args=--allow-run-as-root")
    elif launcher == "mpich":
        reach.append("--launcher_args=-launcher ssh")
    elif launcher in EQUAL:
        env.update(MPI_STYLE=launcher, PATH=f"{stand_ins(cluster)}:{env['PATH']}")
    line = [sys.executable, "-m", "deepspeed.launcher", "-H", "hosts", *reach, *options, "train.py", *given]
    return popen(cluster.on_head(*line), env)


def ended(job, timeout=90):
    """``(exit code, stdout, stderr)``."""
    out, errors = job.communicate(timeout=timeout)
    return job.returncode, out.decode(errors="replace"), errors.decode(errors="replace")


def places(out):
    """The words of the ranks of INIT, in order: host, rank, local rank, world, address."""
    found = re.findall(r"place (\S+) (\d+) (\d+) (\d+) (\S+)", out)
    return sorted(map(list, found), key=lambda place: int(place[1]))


def all_here(ranks):
    """Waits until every rank of SLEEP runs."""
    wait_for(lambda: all(os.path.exists(f"here{rank}") for rank in range(ranks)), 30)


def ends_clean(cluster, seconds=10, but=()):
    """Waits until no process and no file of a job is left on any host, ``but`` command lines that begin so."""

    def left():
        found = [(name, one) for name in NAMES for one in (*cluster.processes(name), *cluster.left(name))]
        return [one for one in found if not one[1].startswith(tuple(but))]

    with contextlib.suppress(AssertionError):
        wait_for(lambda: not left(), seconds)
    rest = left()
    assert not rest, rest
