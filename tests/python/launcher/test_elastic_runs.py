"""Elastic jobs: ranks, agents and hosts go and come, on two pretended hosts."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

import stand_ins
from deepspeed.host.ports import free_port
from deepspeed.launcher.elastic_layout import layout
from deepspeed.launcher.runner import encode_world_info
from launching import command
from processes import running, state_and_parent, wait_for
from sampling import every_case

pytestmark = pytest.mark.dist


jobs = []  # of this test, to be ended where it fails
# A job without torch: rank 0 passes on what the test puts into files as what an engine would tell.
SCRIPT = """
import json, os, sys, time
from deepspeed.host.launcher_messages import tell_launcher
names = "RANK WORLD_SIZE STAND_IN TORCHELASTIC_RESTART_COUNT ELASTIC_RUN_ID MASTER_PORT DS_MEMORY_FOLDER".split()
with open("rounds", "a") as file:
    file.write(json.dumps([os.getpid(), *[os.environ.get(name) for name in names]]) + "\\n")
while not os.path.exists("stop"):
    if os.environ["RANK"] == "0":
        for name in ("saved", "worlds"):
            if os.path.exists(name):
                with open(name) as file:
                    told = json.load(file)
                os.unlink(name)
                tell_launcher(**told)
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stand_ins.install_here(tmp_path, "hb slots=2\nha slots=1\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    jobs.clear()
    yield tmp_path
    for job in jobs:
        if job.poll() is None:
            job.kill()
            job.wait()


def environment(**more):
    own = {"OMP_NUM_THREADS": "1", "DS_ELASTIC_RETRY_S": "0.4", "DS_ELASTIC_WARM_S": "-1"}
    return stand_ins.environment(**{**own, **more})


def start(*args, module="__main__", **more):
    first = ["--elastic_training"] if module == "__main__" else []
    line = command(*first, *args, module=f"deepspeed.launcher.{module}")
    with open(f"err{len(os.listdir())}", "wb") as said:
        job = subprocess.Popen(line, env=environment(**more), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    job.said = lambda: open(said.name).read()
    jobs.append(job)
    return job


def start_host(node, *args, **more):
    """The part of host ``node`` of a job whose hosts start their parts themselves."""
    return start(*args, "--node_rank", node, "train.py", STAND_IN=str(node), **more)


def rounds():
    """``{restart: {rank: [pid, rank, world, host, restart, run id, port, memory]}}`` of what has started."""
    found = {}
    with contextlib.suppress(FileNotFoundError, ValueError):  # half a line
        for row in map(json.loads, pathlib.Path("rounds").read_text().splitlines()):
            found.setdefault(int(row[4]), {})[int(row[1])] = row
    return found


def wait_for_round(number, world, job):
    try:
        wait_for(lambda: len(rounds().get(number, {})) == world or job.poll() is not None, 60)
    finally:
        assert job.poll() is None and len(rounds().get(number, {})) == world, (rounds(), job.said())
    return rounds()[number]


def hosts_of(ranks):
    return [ranks[rank][3] for rank in sorted(ranks)]


def agent_of(rank_pid):
    """rank -> supervisor -> agent, which the stand-in for ssh has become."""
    return int(state_and_parent(state_and_parent(rank_pid)[1])[1])


def tell(name, **message):
    pathlib.Path(name + ".new").write_text(json.dumps(message))
    os.rename(name + ".new", name)


def finish(job, code=0):
    open("stop", "w").close()
    assert job.wait(60) == code, job.said()
    pids = [row[0] for ranks in rounds().values() for row in ranks.values()]
    wait_for(lambda: not any(map(running, pids)), 20)


def test_ranks_and_hosts_go_and_come():
    job = start("-H", "hosts", "train.py", ELASTIC_RUN_ID="mine")
    first = wait_for_round(0, 3, job)
    assert hosts_of(first) == ["hb", "hb", "ha"] and {row[5] for row in first.values()} == {"mine"}

    os.kill(first[1][0], signal.SIGKILL)  # a dead rank: all start again
    again = wait_for_round(1, 3, job)
    assert hosts_of(again) == ["hb", "hb", "ha"]
    wait_for(lambda: "rank 1 of 3" in job.said() and "was killed by SIGKILL" in job.said())

    os.kill(agent_of(again[2][0]), signal.SIGKILL)  # a host that leaves
    assert hosts_of(wait_for_round(2, 2, job)) == ["hb", "hb"] and "host ha was lost" in job.said()
    wait_for(lambda: "host ha is here" in job.said(), 30)
    assert max(rounds()) == 2  # it waits for a checkpoint
    tell("saved", saved="folder")
    larger = wait_for_round(3, 3, job)
    assert hosts_of(larger) == ["hb", "hb", "ha"]

    os.kill(agent_of(larger[0][0]), signal.SIGKILL)  # the first host
    assert hosts_of(wait_for_round(4, 1, job)) == ["ha"]
    wait_for(lambda: "host hb is here" in job.said(), 30)
    tell("worlds", worlds=[1, 2, 4], min_time=0)
    tell("saved", saved="folder")
    shared = wait_for_round(5, 2, job)  # of three slots one stands by
    assert hosts_of(shared) == ["hb", "hb"]
    wait_for(lambda: "1 slot(s) stand by" in job.said())
    assert {row[5] for ranks in rounds().values() for row in ranks.values()} == {"mine"}
    finish(job)


def test_a_world_that_cannot_share_the_batch_is_left_and_a_new_line_of_the_hostfile_joins(folder):
    (folder / "hosts").write_text("hb slots=3\n")
    job = start("-H", "hosts", "--launcher", "ssh", "train.py")
    wait_for_round(0, 3, job)
    tell("worlds", worlds=[1, 2, 4], min_time=0)
    wait_for_round(1, 2, job)
    (folder / "hosts").write_text("hb slots=3\nhc slots=1\n")
    wait_for(lambda: "host hc is here" in job.said(), 30)
    tell("saved", saved="folder")
    assert hosts_of(wait_for_round(2, 4, job)) == ["hb", "hb", "hb", "hc"]
    job.send_signal(signal.SIGTERM)
    finish(job, 143)


def test_too_few_hosts_are_named_at_once_and_when_the_time_is_over():
    job = start("-H", "hosts", "--launcher", "ssh", "--min_elastic_nodes", 3, "--join_timeout", 1, "train.py")
    assert job.wait(60) == 1
    lacking = r"here are 2 host\(s\) with 3 slot\(s\), and needed 3 host\(s\) \(--min_elastic_nodes\)"
    assert len(re.findall(rf"deepspeed: waiting \d s \(--join_timeout\) for hosts: {lacking}", job.said())) == 1
    assert re.search(rf"error: for 1 s .* not enough hosts or slots to go on: {lacking}", job.said()) and not rounds()


def test_launch_takes_part_in_an_elastic_job(folder):
    """``deepspeed.launcher.launch`` by its published flags, on two hosts of one and two slots."""
    world, port = encode_world_info({"h0": [0], "h1": 2}), free_port()
    line = [f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={port}", "--enable_elastic_training"]
    line += ["--min_elastic_nodes", "1", "--max_elastic_nodes", "2", "--no_local_rank"]

    other, head = (start_host(node, *line, module="launch") for node in (1, 0))
    assert hosts_of(wait_for_round(0, 3, head)) == ["0", "1", "1"]
    os.kill(rounds()[0][2][0], signal.SIGKILL)
    assert hosts_of(wait_for_round(1, 3, head)) == ["0", "1", "1"]
    finish(head)
    assert other.wait(30) == 0, other.said()


def test_ranks_that_always_fail_end_the_job(folder):
    (folder / "train.py").write_text(SCRIPT + "\nprint('last words', file=sys.stderr)\nsys.exit(37)\n")
    (folder / "stop").write_text("")
    job = start("--num_gpus", 1, "train.py", DS_ELASTIC_FAILURES="1")
    assert job.wait(60) == 37 and len(rounds()) == 2 and "failed 2 times without a new checkpoint" in job.said()
    assert "---- last lines of rank 0 ----\nlast words" in job.said()
    (folder / "stop").unlink()


def test_hosts_that_nobody_reaches_come_back_by_themselves(folder):
    port = free_port()
    where = ["--no_ssh", "--max_elastic_nodes", 2, "--num_gpus", 1, "--master_addr", "127.0.0.1", "--master_port", port]

    head, other = (start_host(node, *where) for node in (0, 1))
    assert hosts_of(wait_for_round(0, 2, head)) == ["0", "1"]
    other.kill()
    other.wait()
    assert hosts_of(wait_for_round(1, 1, head)) == ["0"]
    other = start_host(1, *where)
    wait_for(lambda: head.said().count("is here") == 1, 30)
    tell("saved", saved="folder")
    assert hosts_of(wait_for_round(2, 2, head)) == ["0", "1"]
    os.kill(head.pid, signal.SIGKILL)  # the head's own host is lost, too; a cluster starts it again
    wait_for(lambda: "waiting 300 s (--join_timeout) for another head" in other.said(), 30)
    kept = {path for path in os.listdir("/dev/shm") if path.startswith("deepspeed-memory-")}
    (folder / "rounds").unlink()
    head = start_host(0, *where)
    assert hosts_of(wait_for_round(0, 2, head)) == ["0", "1"] and other.poll() is None
    assert os.path.basename(rounds()[0][1][7]) in kept  # the memory of the other host, as it was
    finish(head)
    assert other.wait(30) == 0, other.said()


WARM = """
import atexit, json, os, random, sys, time
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
row = {"warm": "torch" in sys.modules, "pid": os.getpid(), "argv": sys.argv, "name": __name__, "file": __file__,
       "path": sys.path[0], "random": random.random(), "leads": os.getsid(0) == os.getpid(), "others": []}
for fd in map(int, os.listdir("/proc/self/fd")):
    if fd > 2 and os.path.exists("/proc/self/fd/%d" % fd):
        row["others"].append(os.readlink("/proc/self/fd/%d" % fd))
atexit.register(lambda: open("left" + rank, "w").close())
with open("row", "a") as file:
    file.write(json.dumps([int(restart), int(rank), row]) + "\\n")
while not os.path.exists("stop"):
    if os.path.exists("fail") and rank == "1":
        os.unlink("fail")
        raise ValueError("why")
    time.sleep(0.02)
"""


def test_ranks_that_start_again_have_torch_imported(folder):
    (folder / "train.py").write_text(WARM)
    job = start("--num_gpus", 2, "train.py", "--x", DS_ELASTIC_WARM_S="0", DS_ELASTIC_FAILURES="1000")

    def round_of(number):
        def rows():
            with contextlib.suppress(FileNotFoundError, ValueError):
                found = [json.loads(line) for line in (folder / "row").read_text().splitlines()]
                return {rank: row for restart, rank, row in found if restart == number}
            return {}

        wait_for(lambda: len(rows()) == 2 or job.poll() is not None, 60)
        assert job.poll() is None, job.said()
        return rows()

    number = 0
    while not (rows := round_of(number))[0]["warm"]:  # the import takes a while
        assert number < 300
        time.sleep(0.2)
        os.kill(rows[number % 2]["pid"], signal.SIGKILL)
        number += 1
    assert number > 0
    first = round_of(0)
    for rank in (0, 1):
        warm, cold = rows[rank], first[rank]
        assert warm.pop("warm") and not cold.pop("warm")
        assert warm.pop("random") != cold.pop("random") and warm.pop("pid") != cold.pop("pid")
        assert warm == cold and warm["leads"]
    assert len({row["random"] for row in round_of(number).values()}) == 2
    (folder / "fail").touch()
    assert round_of(number + 1)[1]["warm"], job.said()
    wait_for(lambda: "ValueError: why" in job.said().rpartition("---- last lines of rank 1 ----")[2], 20)
    story = job.said().rpartition("---- last lines of rank 1 ----")[2]
    assert "Traceback" in story and "ValueError: why" in story and "forked_script" not in story
    (folder / "stop").touch()
    assert job.wait(60) == 0, job.said()
    assert (folder / "left0").exists() and (folder / "left1").exists()
    wait_for(lambda: not any(folder_of(pid) == str(folder) for pid in filter(str.isdigit, os.listdir("/proc"))), 20)


def test_a_signal_behind_the_fork_is_for_the_rank_alone(folder):
    """Under load a forked rank runs later than its launcher, which may have been told already to stop it."""
    (folder / "train.py").write_text("import time; time.sleep(10)")
    text = """
import os, signal, socket, sys, time
from deepspeed.launcher import forked_script
detach = forked_script._detach
forked_script._detach = lambda *args: (time.sleep(0.2), detach(*args))
heard, wakes = socket.socketpair()
heard.setblocking(False), wakes.setblocking(False)
signal.set_wakeup_fd(wakes.fileno())
signal.signal(signal.SIGTERM, lambda *_: None)
command = [sys.executable, "-u", "train.py"]
rank = forked_script.ForkedScript(command, dict(os.environ), (0, 1, 2), (), lambda: None)
getattr(os, sys.argv[1])(rank.pid, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(rank.pid, 0)[1]) == signal.SIGTERM
try:
    raise SystemExit("the launcher has heard %r" % heard.recv(9))
except BlockingIOError:
    pass
"""
    for send in ("kill", "killpg"):
        subprocess.run([sys.executable, "-c", text, send], env=environment(), check=True, timeout=60)


def folder_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/cwd") if int(pid) != os.getpid() else ""
    except OSError:
        return ""


@pytest.mark.skipif(not every_case(), reason="make test-all: half a minute of random events")
def test_twenty_random_events(folder):
    """Ranks and agents are killed, asked to go or stopped at any time, behind checkpoints all come back."""
    numbers = random.Random(20)
    job = start("-H", "hosts", "train.py", DS_ELASTIC_FAILURES="100", DS_LAUNCHER_LINK_S="2")
    wait_for_round(0, 3, job)
    for event in range(20):
        alive = [row for ranks in rounds().values() for row in ranks.values() if running(row[0])]
        victim, kind = numbers.choice(alive)[0], numbers.choice(("rank", "agent", "agent", "stop"))
        try:
            if kind != "rank":
                victim = agent_of(victim)
            if victim not in (0, 1, job.pid, os.getpid()):
                os.kill(victim, signal.SIGSTOP if kind == "stop" else numbers.choice((signal.SIGKILL, signal.SIGTERM)))
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        time.sleep(numbers.random() * 1.5)
        tell("saved", saved=str(event))
        wait_for(lambda: job.poll() is not None or any(
            running(row[0]) for ranks in rounds().values() for row in ranks.values()), 60)  # fmt: skip
        assert job.poll() is None, job.said()

    def all_are_back():
        tell("saved", saved="again")
        time.sleep(0.2)
        last = rounds()[max(rounds())]
        return len(last) == 3 and all(running(row[0]) for row in last.values())

    wait_for(all_are_back, 60)
    finish(job)


def test_the_end_of_ranks_that_save_is_awaited_unless_one_has_failed(folder):
    text = """
import os, signal, sys, time
from deepspeed.host.launcher_messages import tell_launcher
rank = os.environ["RANK"]
def save(*_):
    tell_launcher(saving=int(rank))
    time.sleep(60 if os.path.exists("fail2") else 4)
    open("saved" + rank, "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
open("at" + rank, "w").close()
while not os.path.exists("fail" + rank): time.sleep(0.02)
sys.exit(3)
"""
    line = command("-H", "../hosts", "--launcher", "ssh", "train.py")
    ended = {}
    for code in (143, 3):
        (folder / str(code)).mkdir()
        (folder / str(code) / "train.py").write_text(text)
        ended[code] = subprocess.Popen(line, cwd=str(code), env=environment(DS_LAUNCHER_GRACE_S="3"))
        jobs.append(ended[code])
    wait_for(lambda: all(os.path.exists(f"{code}/at{rank}") for code in ended for rank in range(3)), 30)
    ended[143].send_signal(signal.SIGTERM)
    open("3/fail2", "w").close()
    for code, job in ended.items():
        assert job.wait(50) == code
        assert [os.path.exists(f"{code}/saved{rank}") for rank in range(3)] == [code == 143] * 3


def test_layout():
    hosts = [("a", [0, 1]), ("b", [0]), ("c", [0, 1])]
    assert layout(hosts, None, 1) == hosts
    assert layout(hosts, [1, 2, 4, 8], 1) == [("a", [0, 1]), ("b", [0]), ("c", [0])]
    assert layout(hosts, [1, 2], 1) == [("a", [0, 1])] and layout(hosts, None, 1, 2) == hosts[:2]
    assert layout(hosts, None, 4) == layout(hosts, [8], 1) == layout([], None, 1) == []
