"""Whoever is killed, by whatever signal, at whatever time: nothing of the job is left, and the exit code is right."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from deepspeed.host.ports import claim_any_port, claim_port
from launching import command, environment
from processes import children, running, wait_for, write_program

pytestmark = pytest.mark.dist

# A process of its own between head and agent, as ssh and sshd are: when it goes, both ends of the connection close.
SSH = (
    """#!%s
import os, subprocess, sys, threading
words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[2:] if words[0] in ("-o", "-p") else words[1:]
note = open("ssh_" + words[0], "w"); note.write(str(os.getpid())); note.close()
job = subprocess.Popen(["sh", "-c", words[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
def pump(source, sink):
    while data := os.read(source, 65536):
        os.write(sink, data)
    os.close(sink)
threading.Thread(target=pump, args=(0, job.stdin.fileno()), daemon=True).start()
open("agent_" + words[0], "w").write(str(job.pid))
pump(job.stdout.fileno(), 1)
sys.exit(job.wait())
"""
    % sys.executable
)
TRAIN = """
import os, signal, socket, subprocess, sys, time
rank = os.environ["RANK"]
if rank == "0":  # as torch's store does
    store = socket.create_server(("", int(os.environ["MASTER_PORT"])))
helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
signal.signal(signal.SIGINT, signal.SIG_DFL)
for name, pid in (("rank", os.getpid()), ("helper", helper.pid)):
    open(name + rank + ".part", "w").write(str(pid)); os.rename(name + rank + ".part", name + rank)
if rank == "0" and os.environ["DS_TEST_PHASE"] == "exit":
    sys.exit(0)
while not os.path.exists("go"): time.sleep(0.02)
"""
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGKILL]
# A stopped ssh is as a cut cable: nothing goes through any more, and nothing is closed.
CASES = [
    (who, sig, hosts, phase)
    for who in ("head", "ssh", "agent", "rank", "helper", "link")
    for sig in (SIGNALS if who != "link" else [signal.SIGSTOP])
    for hosts in (1, 2)
    for phase in ("start", "training", "exit")
    if phase != "start" or who not in ("rank", "helper")
]
assert len(CASES) == 84


def number(name):
    path = pathlib.Path(name)
    return int(path.read_text() or 0) if path.exists() else 0


def below(pid):
    try:
        found = children(pid)
    except FileNotFoundError:
        return []
    return found + [one for child in found for one in below(child)]


@pytest.mark.sample("values", 8)
@pytest.mark.parametrize("who, sig, hosts, phase", CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_nobody_is_left(who, sig, hosts, phase, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_program(tmp_path / "ssh", SSH, "")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("203.0.113.1 slots=2\n" + "203.0.113.2 slots=1\n" * (hosts - 1))
    ranks = 2 + (hosts - 1)
    port, claim = claim_any_port(random.randrange(20000, 28000))  # that no connection gets meanwhile
    claim.close()
    env = environment(
        PATH=f"{tmp_path}:{os.environ['PATH']}", DS_TEST_PHASE=phase, MASTER_PORT=str(port), DS_LAUNCHER_GRACE_S="1",
        TMPDIR=f"{tmp_path}/tmp",
    )  # fmt: skip
    (tmp_path / "tmp").mkdir()
    if who == "link":
        env["DS_LAUNCHER_LINK_S"] = "2"
    job = subprocess.Popen(
        command("-H", "hosts", "--launcher", "ssh", "train.py"), env=env,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    last = f"203.0.113.{hosts}"
    if phase == "start":
        wait_for(lambda: number(f"agent_{last}") or job.poll() is not None, 20)
        assert job.poll() is None, job.stderr.read()
    else:
        wait_for(lambda: all(number(f"{name}{rank}") for rank in range(ranks) for name in ("rank", "helper")), 20)
    if phase == "exit":
        wait_for(lambda: not running(number("rank0")), 10)
    victims = {
        "head": job.pid, "ssh": number(f"ssh_{last}"), "link": number(f"ssh_{last}"), "agent": number(f"agent_{last}"),
        "rank": number(f"rank{ranks - 1}"), "helper": number(f"helper{ranks - 1}"),
    }  # fmt: skip
    every = {*below(job.pid), *(one for name in ("203.0.113.1", last) for one in below(number(f"agent_{name}")))}
    every |= {number(f"agent_203.0.113.{one}") for one in (1, hosts)}
    assert all(victims.values() if phase == "training" else [victims[who]])  # 0 would be this very test
    os.kill(victims[who], sig)
    if who == "helper":
        time.sleep(0.1)
        assert job.poll() is None
        open("go", "w").close()
    wait_for(lambda: job.poll() is not None, 15)
    code = job.returncode
    by_signal = {
        "head": -sig if sig == signal.SIGKILL else 128 + sig, "rank": 128 + sig, "helper": 0, "ssh": 1, "link": 1,
        "agent": 1 if sig == signal.SIGKILL or phase == "start" else 128 + sig,
    }  # fmt: skip
    if who == "agent" and phase == "start" and code == 128 + sig:
        by_signal["agent"] = code  # on a busy machine its ranks have started before we came
    wait_for(lambda: not any(map(running, every)), 5)
    assert code == by_signal[who], job.stderr.read()
    claim = None

    def claimed():
        nonlocal claim
        claim = claim or claim_port(port)
        return claim

    wait_for(claimed)  # another test may have the port for a while
    with claim:
        assert os.listdir(tmp_path / "tmp") == []
