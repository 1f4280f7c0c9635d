"""Jobs on several hosts, which stand-ins for ssh, pdsh, srun and mpirun pretend to reach."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import launching
import stand_ins
from deepspeed.launcher.host_link import Way
from launching import command
from places import PYTHON
from processes import children, pids, running, state_and_parent, succeeded, taken_port, wait_for
from stand_ins import environment

pytestmark = pytest.mark.dist


SEEN = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR STAND_IN".split()
seen = [[os.environ.get(n) for n in names], sys.argv[1:], os.environ["MASTER_PORT"]]
open("seen" + os.environ["RANK"], "w").write(json.dumps(seen))
print("hello from", os.environ["RANK"])
"""
NOTE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def note(pid):
    with open("pids", "a") as file: file.write("%d\\n" % pid)
note(os.getpid())
"""


# Variables of ranks 0 to 2: RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE.
PLACES = [["0", "0", "3", "2", "0", "2"], ["1", "1", "3", "2", "0", "2"], ["2", "0", "3", "1", "1", "2"]]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stand_ins.install_here(tmp_path, "hb slots=2\nha slots=1\n")  # not in Slurm's order
    return tmp_path


def run(*args, input=None, **more):
    return launching.run(command("-H", "hosts", *args), environment(**more), input=input)


def start(*args, **more):
    return launching.start(command("-H", "hosts", *args), environment(**more))


def script(text, name="train.py"):
    pathlib.Path(name).write_text(text)
    return name


def seen(count):
    return [json.loads(pathlib.Path(f"seen{rank}").read_text()) for rank in range(count)]


def wait_until_nobody_is_left(seconds=15):
    wait_for(lambda: not any(map(running, pids())), seconds)


# ---- what ranks see -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("launcher", ["ssh", "pdsh", "slurm"])
def test_ranks_get_their_place_on_their_host(launcher):
    script(SEEN)
    done = succeeded(run("--launcher", launcher, "train.py", "--x", "a 'b' \"c\" $d %h `e` \\"))
    found = seen(3)
    assert [one[0][:6] for one in found] == PLACES and [one[0][7] for one in found] == ["hb", "hb", "ha"]
    assert [one[1] for one in found] == [[f"--local_rank={i}", "--x", "a 'b' \"c\" $d %h `e` \\"] for i in (0, 1, 0)]
    assert len({one[2] for one in found}) == len({one[0][6] for one in found}) == 1
    assert sorted(done.stdout.splitlines()) == ["[ha:2] hello from 2", "[hb:0] hello from 0", "[hb:1] hello from 1"]
    log = open("log").read()
    assert "train.py" not in log  # the command travels by itself
    assert not re.search(r"\b[0-9a-f]{32}\b", log)  # and nobody reads the key of the job in a list of processes


def test_without_pdsh_hosts_are_reached_by_ssh(folder):
    (folder / "bin" / "pdsh").unlink()
    for name in ("sh", "bash", "env"):  # what the stand-in needs: /usr/bin may have a pdsh
        (folder / "bin" / name).symlink_to(shutil.which(name))
    script(SEEN)
    done = run("train.py", PATH=str(folder / "bin"))
    assert done.returncode == 0 and "pdsh is not installed; the hosts are reached by ssh" in done.stderr
    assert "ssh" in open("log").read()
    assert "pdsh" not in run("-q", "train.py", PATH=str(folder / "bin")).stderr


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_random_arguments_and_values_arrive_byte_for_byte(launcher):
    numbers = random.Random(len(launcher))
    words = [bytes(numbers.choice(range(1, 256)) for _ in range(numbers.randint(1, 30))) for _ in range(500)]
    words[:3] = [b"", b"--rank=%n $(id) 'x'", "ümlaut\n".encode()]
    script("""
import os, sys
with open("got%s" % os.environ["RANK"], "wb") as file:
    file.write(b"\\0".join([*map(os.fsencode, sys.argv[2:]), *[os.environb[b"DS_TEST_%d" % i] for i in range(500)]]))
""")
    env = {**environment(), **{f"DS_TEST_{i}": os.fsdecode(word) for i, word in enumerate(words)}}
    made = command("-H", "hosts", "--launcher", launcher, "train.py", *map(os.fsdecode, words))
    succeeded(subprocess.run(made, env=env, capture_output=True, timeout=60))
    assert [pathlib.Path(f"got{rank}").read_bytes().split(b"\0") for rank in range(3)] == [words * 2] * 3


def test_variables_that_travel(folder):
    (folder / ".deepspeed_env").write_text("FROM_FILE=x y=z\n")
    (folder / "home" / ".deepspeed_env").write_text("FROM_FILE=home\nFROM_HOME=1\n")
    names = "NCCL_X UCX_TLS MLFLOW_ID SECRET FROM_FILE FROM_HOME PYTHONPATH".split()
    write = "open('env' + os.environ['RANK'], 'w').write(json.dumps([os.environ.get(n) for n in %r]))"
    script("import json, os\n" + write % names)
    mine = {"NCCL_X": "1", "UCX_TLS": "tcp", "MLFLOW_ID": "m", "SECRET": "s"}
    assert run("--launcher", "ssh", "train.py", DS_ACCELERATOR="cuda", **mine).returncode == 0
    values = json.loads(open("env2").read())
    assert values[:6] == ["1", "tcp", "m", None, "x y=z", "1"]
    assert values[6].split(":") == [str(folder), PYTHON, "/only/on/ha"]
    (folder / "other_env").write_text("FROM_FILE=other\n")
    assert run("--launcher", "ssh", "train.py", DS_ENV_FILE="other_env", **mine).returncode == 0
    assert json.loads(open("env0").read())[0:5] == [None, "tcp", "m", None, "other"]


def test_hosts_and_slots_can_be_chosen(folder):
    script(SEEN)
    assert run("--launcher", "ssh", "-i", "hb:1@ha", "train.py").returncode == 0
    assert [one[0][2] for one in seen(2)] == ["2", "2"]
    assert run("--launcher", "ssh", "--num_nodes", 1, "train.py").returncode == 0
    assert [one[0][7] for one in seen(2)] == ["hb", "hb"]
    assert run("--num_nodes", 3, "train.py").stderr.startswith("deepspeed: error: --num_nodes is 3, but the hostfile")


def test_only_rank_0_reads_what_the_user_types():
    script("import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    done = run("--launcher", "ssh", "train.py", input="yes\nno\n")
    assert sorted(done.stdout.splitlines()) == ["[ha:2] 2 ''", "[hb:0] 0 'yes\\nno\\n'", "[hb:1] 1 ''"]


def test_a_virtual_environment_is_entered(folder):
    (folder / "venv").mkdir()
    (folder / "venv" / "python").symlink_to(sys.executable)
    (folder / "activate it").write_text(f'export IN_VENV=1 PATH="{folder}/venv:$PATH"\n')
    script("import os; print(os.environ['IN_VENV'])")
    done = run("--launcher", "ssh", "--venv_script", folder / "activate it", "train.py")
    assert sorted(done.stdout.splitlines()) == ["[ha:2] 1", "[hb:0] 1", "[hb:1] 1"], done.stderr
    alone = launching.run(command("--num_gpus", 2, "--venv_script", folder / "activate it", "train.py"), environment())
    assert alone.stdout == "1\n1\n", alone.stderr


# ---- how jobs end -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("launcher", ["ssh", "pdsh", "slurm"])
def test_the_first_failing_rank_ends_the_job_on_all_hosts(launcher):
    script(
        NOTE
        + """
if rank == 2:
    while len(open("pids").read().split()) < 3: time.sleep(0.01)
    print("last words", file=sys.stderr)
    sys.exit(37)
time.sleep(600)
"""
    )
    done = run("--launcher", launcher, "train.py")
    assert done.returncode == 37
    assert "rank 2 of 3 (pid " in done.stderr and "host ha) failed with exit code 37" in done.stderr
    assert "---- last lines of rank 2 ----\nlast words" in done.stderr
    wait_until_nobody_is_left()


def test_survivors_may_tidy_up_and_are_killed_when_they_do_not():
    script(
        NOTE
        + """
if rank == 2:
    while not all(os.path.exists("ready%d" % one) for one in (0, 1)): time.sleep(0.01)
    sys.exit(3)
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: (print("tidied"), sys.exit(0)))
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("ready%d" % rank, "w").close()
while True: time.sleep(0.1)
"""
    )
    done = run("--launcher", "ssh", "train.py", DS_LAUNCHER_GRACE_S="1")
    assert done.returncode == 3 and "[hb:0] tidied" in done.stdout
    wait_until_nobody_is_left()


def test_output_can_go_to_files_and_the_pid_to_one(folder):
    script("import os, time; print('from', os.environ['RANK'])\nwhile not os.path.exists('go'): time.sleep(0.02)")
    job = start("--launcher", "ssh", "--save_pid", "--enable_each_rank_log", "logs", "train.py")
    wait_for(lambda: os.path.exists(f"/tmp/{job.pid}.ds"), 15)
    (folder / "go").write_text("")
    assert job.communicate(timeout=30)[0] == "" and job.returncode == 0 and not os.path.exists(f"/tmp/{job.pid}.ds")
    logs = {path.name.split("_")[1]: path.read_text() for path in (folder / "logs").iterdir()}
    assert logs == {f"rank{rank}.log": f"[{host}:{rank}] from {rank}\n" for rank, host in enumerate(["hb", "hb", "ha"])}


@pytest.mark.parametrize("sig, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_reach_every_rank_once(sig, code):
    script(
        NOTE
        + """
heard = []
def handler(number, frame):
    with open("heard%d" % rank, "a") as file: file.write("%d\\n" % number)
    sys.exit(0)
signal.signal(signal.SIGINT, handler); signal.signal(signal.SIGTERM, handler)
open("ready%d" % rank, "w").close()
while True: time.sleep(0.05)
"""
    )
    job = start("--launcher", "ssh", "train.py")
    wait_for(lambda: all(os.path.exists(f"ready{rank}") for rank in range(3)), 15)
    job.send_signal(sig)
    assert job.wait(60) == code
    assert [open(f"heard{rank}").read() for rank in range(3)] == [f"{int(sig)}\n"] * 3
    wait_until_nobody_is_left()


@pytest.mark.parametrize("who", ["head", "link", "agent"])
def test_nobody_is_left_when_one_of_the_guards_is_killed(who):
    script(NOTE + "note(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)\ntime.sleep(600)\n")
    job = start("--launcher", "ssh", "train.py")
    wait_for(lambda: len(pids()) == 6, 15)
    # The stand-in for ssh becomes the agent: it is both.
    os.kill(job.pid if who == "head" else children(job.pid)[-1], signal.SIGTERM if who == "link" else signal.SIGKILL)
    wait_until_nobody_is_left(10)
    assert job.wait(60) == {"head": -9, "link": 143, "agent": 1}[who], job.stderr.read()
    if who == "agent":
        assert "host ha was lost" in job.stderr.read()


def test_a_host_that_is_not_heard_of_is_lost():
    script(NOTE + "time.sleep(600)\n")
    job = start("--launcher", "ssh", "train.py", DS_LAUNCHER_LINK_S="2")
    wait_for(lambda: len(pids()) == 3, 15)
    # The agent is stopped, as by a cut cable: nobody says anything, nothing is closed.
    os.kill(children(job.pid)[-1], signal.SIGSTOP)
    assert job.wait(60) == 1
    assert "host ha was lost" in (said := job.stderr.read()) and "nothing was heard for 2 s" in said
    wait_until_nobody_is_left(10)


def test_a_stopped_job_goes_on():
    script(NOTE + "open('at%d' % rank, 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.05)\n")
    job = start("--launcher", "ssh", "train.py", DS_LAUNCHER_LINK_S="2")
    wait_for(lambda: all(os.path.exists(f"at{rank}") for rank in range(3)), 15)
    job.send_signal(signal.SIGTSTP)
    wait_for(lambda: all(state_and_parent(pid)[0] == "T" for pid in [job.pid, *pids()]), 15)
    time.sleep(2.5)  # longer than a link may be silent
    job.send_signal(signal.SIGCONT)
    open("go", "w").close()
    assert job.wait(60) == 0, job.stderr.read()


# ---- what does not start ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "hosts, args, named",
    [
        ("ha slots=1\ngone9 slots=1\n", ["--launcher", "ssh"], "host gone9 could not be reached.*No route to host"),
        ("ha slots=1\nhb slots=1\n", ["--launcher", "smoke"], "there is no launcher named 'smoke'"),
        ("ha slots=1\nhb slots=2\n", ["--launcher", "impi"], "same number of slots.*ha 1, hb 2"),
        ("ha slots=1\nhb slots=2\n", ["--launcher", "openmpi", "-i", "ha"], "does not support --include"),
        ("ha slots=1\nhb\n", [], "hosts: hostfile line 2 is 'hb'"),
    ],
)
def test_errors_name_what_to_change(hosts, args, named, folder):
    (folder / "hosts").write_text(hosts)
    done = run(*args, script(SEEN))
    assert done.returncode == 1 and re.search(named, done.stderr), done.stderr


def test_a_script_that_is_missing_and_a_port_that_is_taken():
    done = run("--launcher", "ssh", "nowhere.py")
    assert done.returncode == 1 and "host h" in done.stderr and "the script 'nowhere.py' does not exist" in done.stderr
    with taken_port() as port:
        done = run("--launcher", "ssh", "--master_port", port, script(SEEN))
    assert done.returncode == 1 and "of host hb is in use by another process" in done.stderr
    assert not os.path.exists("seen0")


def test_another_version_of_python_is_refused(folder):
    older = 'sh -c "${*/import os,sys;/import os,sys;sys.version_info=(2,7);}"'
    (folder / "bin" / "ssh").write_text((folder / "bin" / "ssh").read_text().replace('sh -c "$*"', older))
    done = run("--launcher", "ssh", script(SEEN))
    assert done.returncode == 1 and "has python 2.7, and this one 3." in done.stderr


# ---- MPI ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "launcher, style",
    [
        ("openmpi", "OMPI_COMM_WORLD_RANK,OMPI_COMM_WORLD_SIZE,OMPI_COMM_WORLD_LOCAL_RANK"),
        ("mpich", "PMI_RANK,PMI_SIZE,MPI_LOCALRANKID"),
        ("mpich", "PALS_RANKID,PMI_SIZE,PALS_LOCAL_RANKID"),
    ],
)
def test_mpi_starts_the_ranks(launcher, style):
    script(SEEN)
    succeeded(
        run("--launcher", launcher, "--master_addr", "10.0.0.7", "train.py", "a b", MPI_STYLE=style, DS_SECRET="s3")
    )
    found = seen(3)
    assert [one[0][:7] for one in found] == [[*place, "10.0.0.7"] for place in PLACES]
    assert found[2][1] == ["--local_rank=0", "a b"]
    log = open("log").read()
    assert "DS_SECRET" in log and "s3" not in log


def test_a_rank_of_mpi_that_fails():
    script("import os, sys; sys.exit(37 if os.environ['RANK'] == '2' else 0)")
    done = run("--launcher", "mpich", "train.py", MPI_STYLE="PMI_RANK,PMI_SIZE,MPI_LOCALRANKID")
    assert done.returncode == 37
    assert "deepspeed: rank 2 of 3 (pid " in done.stderr and "deepspeed: mpirun (pid " in done.stderr
    assert "---- last lines of mpirun ----" in done.stderr and "rank 0" not in done.stderr


def test_what_a_program_on_the_way_has_started_ends_with_it():
    way = Way(["sh", "-c", "sleep 600 & echo $!; wait"], dict(os.environ), False)
    wait_for(lambda: way.read(way.streams[1]) or way.said, 30)
    sleeps = int(way.said)
    assert running(sleeps)
    way.end()
    wait_for(lambda: not running(sleeps), 30)


def test_output_of_ranks_of_mpi_can_go_to_files():
    script(SEEN)
    launcher, style = "mpich", "PMI_RANK,PMI_SIZE,MPI_LOCALRANKID"
    done = run("--launcher", launcher, "--enable_each_rank_log", "logs", "train.py", MPI_STYLE=style)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert sorted(open(f"logs/{name}").read() for name in os.listdir("logs")) == [f"hello from {i}\n" for i in range(3)]
