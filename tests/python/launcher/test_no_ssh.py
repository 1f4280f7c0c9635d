"""Jobs whose hosts are started by hand: --no_ssh."""

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from types import SimpleNamespace

import pytest

import launching
from deepspeed.host.job_key import MAKE_KEY, is_from_here
from deepspeed.host.ports import free_port
from deepspeed.launcher import agent, arrivals, linux, no_ssh, runner
from deepspeed.launcher.cluster import listen
from deepspeed.launcher.control import MESSAGE, Link, LinkLost, encode_frame
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.host_link import HostLink
from launching import CLUSTER, command, environment
from processes import wait_for
from refusals import refused
from threads import started

pytestmark = pytest.mark.dist


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in CLUSTER:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def port():
    return free_port()


def start(port, *args, **more):
    line = ["--no_ssh", "--master_addr", "127.0.0.1", "--master_port", port, "--join_timeout", "20", *args]
    return launching.start(command(*line), environment(**more))


def ends(*jobs):
    return [(*job.communicate(timeout=60), job.returncode) for job in jobs]


SEEN = """
import json, os, socket
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT MINE".split()
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
open("seen%d" % rank, "w").write(json.dumps([os.environ.get(n) for n in names]))
# The ranks meet at the port where their hosts did.
if rank == 0:
    store = socket.create_server(("", port))
    for _ in range(2): store.accept()[0].close()
else:
    while True:
        try: socket.create_connection(("127.0.0.1", port)).close(); break
        except OSError: pass
print("rank", rank)
"""


def test_hosts_come_in_any_order_and_may_differ(folder, port):
    (folder / "train.py").write_text(SEEN)
    second = start(port, "--num_nodes", 2, "--node_rank", 1, "--num_gpus", 1, "train.py", MINE="second")
    time.sleep(0.3)
    first = start(port, "--num_nodes", 2, "--num_gpus", 2, "train.py", JOB_COMPLETION_INDEX="0", MINE="first")
    said = ends(first, second)
    assert [code for _, _, code in said] == [0, 0], said
    places = [json.loads((folder / f"seen{rank}").read_text()) for rank in range(3)]
    assert [one[:6] for one in places] == [
        ["0", "0", "3", "2", "0", "2"], ["1", "1", "3", "2", "0", "2"], ["2", "0", "3", "1", "1", "2"],
    ]  # fmt: skip
    assert {tuple(one[6:8]) for one in places} == {("127.0.0.1", str(port))}
    assert [one[8] for one in places] == ["first", "first", "second"]
    assert ":2] rank 2" in said[1][0] and ":2]" not in said[0][0]  # each host shows its own ranks


def test_a_hostfile_says_how_many_slots_each_has(folder, port):
    (folder / "train.py").write_text(SEEN)
    (folder / "hosts").write_text("first slots=2\nsecond slots=1\n")
    jobs = [start(port, "-H", "hosts", "--node_rank", node, "train.py") for node in (0, 1)]
    assert [code for _, _, code in ends(*jobs)] == [0, 0]


def test_a_failing_rank_ends_all_hosts_with_its_code(folder, port):
    (folder / "train.py").write_text("""
import os, sys, time
open("here" + os.environ["RANK"], "w").close()
while not all(os.path.exists("here%d" % rank) for rank in range(2)): time.sleep(0.01)
if os.environ["RANK"] == "1": print("last words"); sys.exit(41)
time.sleep(600)
""")
    jobs = [start(port, "--num_nodes", 2, "--node_rank", node, "--num_gpus", 1, "train.py") for node in (0, 1)]
    said = ends(*jobs)
    assert [code for _, _, code in said] == [41, 41]
    assert all("rank 1 of 2 (pid " in errors and "last words" in errors for _, errors, _ in said), said


@pytest.mark.parametrize("node, code", [(0, 143), (1, 143)])
def test_a_host_that_is_ended_ends_the_job(node, code, folder, port):
    text = "import os, time; open('here' + os.environ['RANK'], 'w').close(); time.sleep(600)"
    (folder / "train.py").write_text(text)
    jobs = [start(port, "--num_nodes", 2, "--node_rank", one, "--num_gpus", 1, "train.py") for one in (0, 1)]
    wait_for(lambda: all(os.path.exists(f"here{rank}") for rank in (0, 1)), 30)
    jobs[node].terminate()
    assert [one[2] for one in ends(*jobs)] == [code, code]


def test_hosts_that_do_not_fit(folder, port):
    (folder / "train.py").write_text("")
    jobs = [start(port, "--num_nodes", 3, "--node_rank", node, "--num_gpus", 1, "train.py") for node in (0, 1, 1)]
    said = ends(*jobs)
    assert all(code == 1 for _, _, code in said)
    assert "two processes say that they are host 1" in said[0][1] and "two processes" in said[1][1] + said[2][1]
    port = free_port()
    jobs = [start(port, "--num_nodes", count, "--node_rank", node, "train.py") for node, count in ((0, 2), (1, 3))]
    jobs[1].wait(30)
    assert "host 1 was started for 3 hosts, and host 0 for 2" in jobs[1].stderr.read()
    jobs[0].terminate()
    ends(*jobs)


def test_strangers_at_the_port_change_nothing(folder, port):
    (folder / "train.py").write_text("print('trained')")
    first = start(port, "--num_nodes", 2, "--node_rank", 0, "--num_gpus", 1, "train.py", DS_JOB_KEY="ours")
    limit, strangers = time.monotonic() + 20, []
    said = [b"GET / HTTP/1.0\r\n\r\n", b"", encode_frame(MESSAGE, b"[1]"), encode_frame(MESSAGE, b'{"join": 7}')]
    node = b'{"join": {"proof": "x", "nonce": 1, "node": "1", "nodes": 2}}'
    said += [encode_frame(MESSAGE, node), b"J\x0f\xff\xff\xff"]
    while len(strangers) < len(said) and time.monotonic() < limit:
        try:
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            strangers[-1].sendall(said[len(strangers) - 1])
        except ConnectionRefusedError:
            time.sleep(0.02)
    other = start(port, "--num_nodes", 2, "--node_rank", 1, "--num_gpus", 1, "train.py", DS_JOB_KEY="theirs")
    assert ends(other)[0][2] == 1
    second = start(port, "--num_nodes", 2, "--node_rank", 1, "--num_gpus", 1, "train.py", DS_JOB_KEY="ours")
    assert [code for _, _, code in ends(first, second)] == [0, 0]
    for stranger in strangers:
        stranger.close()


def test_without_a_key_a_line_says_how_to_make_one(folder, port):
    (folder / "train.py").write_text("print('trained')")

    def both(*args, **more):
        said = ends(*(start(port, "--num_nodes", 2, "--node_rank", node, *args, "train.py", **more) for node in (0, 1)))
        assert [code for _, _, code in said] == [0, 0], said
        return said[0][1], said[1][1]

    head, other = both("--num_gpus", 1)
    assert head.count(MAKE_KEY) == 1 and "other hosts are refused" in head and MAKE_KEY not in other
    made = subprocess.run(["sh", "-c", f"{MAKE_KEY}; echo $DS_JOB_KEY"], capture_output=True, text=True).stdout
    assert re.fullmatch("[0-9a-f]{32}\n", made) and MAKE_KEY not in both("--num_gpus", 1, DS_JOB_KEY=made.strip())[0]
    head, other = both("--num_gpus", 1, "--insecure")
    assert "warning: --insecure without DS_JOB_KEY" in head and "warning: --insecure" in other and MAKE_KEY not in head


def stranger(port):
    """A head that takes whoever comes, and asks for all that it has."""
    with socket.create_server(("127.0.0.1", port)) as server:
        fd = server.accept()[0].detach()
        link = Link(fd, fd)
        link.send({"nonce": "1"})
        with contextlib.closing(link):
            return link.wait_for("join", 5.0)


def test_without_a_key_an_agent_joins_no_head_of_another_host(monkeypatch):
    hello, port = {"node": 1, "nodes": 2}, free_port()
    monkeypatch.setattr(agent, "is_from_here", lambda connection: False)
    for key, insecure, joins in (("", False, False), ("ours", False, True), ("", True, True)):
        answer = started(stranger, port)
        error = refused(LaunchError, "", agent.connect, ["127.0.0.1"], port, key, hello, 0.5, insecure)
        assert ("is another host, and the job has no key" in str(error)) is not joins, error
        assert isinstance(answer.result(), dict) if joins else isinstance(answer.exception(), LinkLost)


@pytest.mark.parametrize("key, insecure, joins", [("", False, False), ("ours", False, True), ("", True, True)])
def test_without_a_key_a_head_lets_no_other_host_in(monkeypatch, key, insecure, joins):
    monkeypatch.setattr(arrivals, "is_from_here", lambda connection: False)
    hosts, said, joined = [HostLink("here", 0, [0]), HostLink("number 1", 1, [])], [], []
    meeting = listen(0)
    job = SimpleNamespace(
        meeting=meeting, key=key, insecure=insecure, args=SimpleNamespace(elastic_training=False),
        host_of=lambda join, hosts: (hosts[join["node"]], ""), key_of=lambda host: key,
    )  # fmt: skip
    selector, failed = linux.Selector(), []
    door = arrivals.Arrivals(job, hosts, selector, joined.append, failed.append, said.append)
    visit = started(agent.connect, ["127.0.0.1"], meeting.getsockname()[1], key, {"node": 1}, 5.0, insecure=True)
    limit = time.monotonic() + 20
    while not visit.done() and time.monotonic() < limit:
        for found, _ in selector.select(0.05):
            found.data()
        door.turn()
    door.close()
    assert not failed and bool(joined) is joins
    if joins:
        visit.result().close()
        assert not said
    else:
        assert MAKE_KEY in str(visit.exception()) and isinstance(visit.exception(), LaunchError)
        assert len(said) == 1 and "a connection from 127.0.0.1 was refused" in said[0]


def test_ends_of_a_connection_on_one_machine():
    def ends_at(here, there):
        return SimpleNamespace(getsockname=lambda: (here, 1), getpeername=lambda: (there, 2))

    assert is_from_here(ends_at("127.0.0.1", "127.0.0.1")) and is_from_here(ends_at("127.0.0.1", "127.0.0.2"))
    assert is_from_here(ends_at("10.0.0.7", "10.0.0.7")) and is_from_here(ends_at("fe80::1%eth0", "::1%lo"))
    assert not is_from_here(ends_at("10.0.0.7", "10.0.0.8")) and not is_from_here(ends_at("::1", "fe80::1%eth0"))


def test_a_host_that_does_not_come(folder):
    (folder / "train.py").write_text("")
    line = ["--num_nodes", 2, "--join_timeout", 3, "train.py"]  # in which host 0 itself must come
    first, second = ends(*[start(free_port(), "--node_rank", node, *line) for node in (0, 1)])
    assert first[2] == 1 and "did not come within 3 s (--join_timeout): 1 (number 1). Here are 1 of 2" in first[1]
    assert second[2] == 1 and "was not reached within 3 s" in second[1]


@pytest.mark.parametrize(
    "line, named",
    [
        ("--node_rank 0", "--num_nodes N"),
        ("--num_nodes 2", "NODE_RANK, JOB_COMPLETION_INDEX, SLURM_NODEID"),
        ("--num_nodes 2 --node_rank 2", "numbered from 0"),
        ("--num_nodes 2 --node_rank 1", "--master_addr"),
    ],
)
def test_an_unknown_place_is_refused(line, named):
    refused(runner.LaunchError, named, runner.main, ["--no_ssh", *line.split(), "train.py"])


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_notes_of_the_plan_are_shown(nodes, monkeypatch, capsys):
    monkeypatch.setattr(no_ssh, "launch", lambda made: 0)
    monkeypatch.setattr(no_ssh, "_run_part", lambda *_: 0)
    place = ["--num_nodes", nodes, "--node_rank", "0", "--master_addr", "localhost"]
    assert runner.main(["--no_ssh", "--hostfile", "/nowhere/hosts", *place, "--no_python", "true"]) == 0
    assert "There is no hostfile /nowhere/hosts; using this machine only" in capsys.readouterr().err
