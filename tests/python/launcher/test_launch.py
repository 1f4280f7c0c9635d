"""Jobs that really start: what the ranks see, how jobs end, and that nothing of them is left."""

import contextlib
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

import launching
from deepspeed.host.ports import free_port
from launching import command
from processes import children, pids, running, state_and_parent, succeeded, taken_port, wait_for
from refusals import refused

pytestmark = pytest.mark.dist


# A rank that records its process id and, on request, starts a helper that nobody waits for.
PRELUDE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def note(pid):
    with open("pids", "a") as file:
        file.write("%d\\n" % pid)
note(os.getpid())
def helper():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    note(subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(**more):
    """With a port of its own: somebody else on this machine may have the default one."""
    return launching.environment(**{"MASTER_PORT": str(free_port()), **more})


def run(*args, input=None, **more):
    return launching.run(command(*args), environment(**more), input=input)


def start(*args, **more):
    return launching.start(command(*args), environment(**more))


def wait_until_ready(*names):
    wait_for(lambda: all(map(os.path.exists, names or ("ready0", "ready1"))))


def script(text, name="train.py"):
    pathlib.Path(name).write_text(PRELUDE + text)
    return name


def assert_nobody_left(count, seconds=5):
    assert len(pids()) == count
    wait_for(lambda: not any(map(running, pids())), seconds)


# ---- what ranks see -----------------------------------------------------------------------------------------------
def test_ranks_get_their_place_and_the_script_its_arguments():
    script("""
import json
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR".split()
seen = [sys.argv, [os.environ[n] for n in names], os.environ["MASTER_PORT"].isdigit(), sys.stdin.read()]
with open("seen%d" % rank, "w") as file: json.dump(seen, file)
""")
    done = succeeded(run("--num_accelerators", 3, "train.py", "--deepspeed", "-x", "a b"))
    assert [json.loads(pathlib.Path(f"seen{rank}").read_text()) for rank in range(3)] == [
        [
            ["train.py", f"--local_rank={rank}", "--deepspeed", "-x", "a b"],
            [str(rank), str(rank), "3", "3", "0", "1", "127.0.0.1"], True, "",
        ] for rank in range(3)
    ]  # fmt: skip
    assert done.stderr.count("OMP_NUM_THREADS") == 1
    assert run("--num_gpus", 1, "train.py", OMP_NUM_THREADS="1").stderr == ""
    assert run("--num_gpus", 1, "train.py", DS_LOG_LEVEL="warning").stderr == ""


def test_module_and_program_and_no_local_rank(folder):
    (folder / "pkg").mkdir()
    (folder / "pkg" / "run.py").write_text("import sys; print('module', sys.argv[1:])")
    assert run("--module", "--num_gpus", 1, "pkg.run", "x").stdout == "module ['--local_rank=0', 'x']\n"
    assert run("--no_python", "--num_gpus", 1, "echo", "x").stdout == "--local_rank=0 x\n"
    assert run("--no_python", "--no_local_rank", "--num_gpus", 2, "echo", "x").stdout == "x\nx\n"


def test_only_rank_0_reads_what_the_user_types():
    script("print(rank, repr(sys.stdin.readline()))")
    assert sorted(run("--num_gpus", 2, "train.py", input="yes\n").stdout.splitlines()) == ["0 'yes\\n'", "1 ''"]


def test_streams_stay_apart_and_lines_can_carry_the_rank():
    script("print('out'); sys.stderr.write('err\\nno newline')")
    done = run("--num_gpus", 2, "--log_rank_prefix", "train.py", OMP_NUM_THREADS="1")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert sorted(done.stderr.splitlines()) == sorted(f"[rank {r}] {t}" for r in (0, 1) for t in ("err", "no newline"))
    done = run("--num_gpus", 2, "train.py", OMP_NUM_THREADS="1", DS_LOG_RANK_PREFIX="1")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert run("--num_gpus", 1, "train.py", OMP_NUM_THREADS="1").stderr == "err\nno newline"


def test_logs_of_each_rank(folder):
    script("print('out', rank); sys.stderr.write('err\\n')")
    done = run("--num_gpus", 2, "--enable_each_rank_log", "logs/here", "train.py", OMP_NUM_THREADS="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    logs = sorted((folder / "logs" / "here").iterdir(), key=lambda path: path.name[-5])
    assert [path.name[14:] for path in logs] == ["_rank0.log", "_rank1.log"]
    assert all(path.name[:14].isdigit() for path in logs) and logs[1].read_text() == "out 1\nerr\n"


def test_much_output_arrives_whole():
    script("for i in range(30000): print(rank, i)")
    lines = run("--num_gpus", 2, "train.py").stdout.splitlines()
    assert all([line for line in lines if line[0] == rank] == [f"{rank} {i}" for i in range(30000)] for rank in "01")


def test_a_terminal_stays_a_terminal():
    script("""
import shutil
print(sys.stdout.isatty(), sys.stderr.isatty(), shutil.get_terminal_size().columns, "typed", input())
""")
    ours, theirs = os.openpty()
    import fcntl  # noqa: E401, PLC0415
    import struct
    import termios

    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 97, 0, 0))
    job = subprocess.Popen(
        command("--num_gpus", 1, "train.py"), env=environment(OMP_NUM_THREADS="1"), stdin=theirs, stdout=theirs,
        stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, b"hello\n")
    seen = b""
    with contextlib.suppress(OSError):
        while data := os.read(ours, 4096):
            seen += data
    assert job.wait(60) == 0
    assert b"True True 97 typed hello" in seen.replace(b"\r\n", b"\n")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_are_bound():
    cores = sorted(os.sched_getaffinity(0))
    script("print(sorted(os.sched_getaffinity(0)))")
    done = run("--num_gpus", 2, "--bind_cores_to_rank", "--bind_core_list", f"{cores[0]},{cores[1]}", "train.py")
    assert sorted(done.stdout.splitlines()) == [f"[{cores[0]}]", f"[{cores[1]}]"]
    done = run("--num_gpus", 2, "--bind_cores_to_rank", "--bind_core_list", "100000,100001", "train.py")
    assert done.returncode == 1 and "100000-100001" in done.stderr
    done = run("--num_gpus", len(cores) + 1, "--bind_cores_to_rank", "train.py")
    assert done.returncode == 1 and "cannot be bound" in done.stderr


def test_save_pid(folder):
    script("import time; print('up'); time.sleep(60)")
    job = start("--save_pid", "--num_gpus", 1, "train.py")
    path = f"/tmp/{job.pid}.ds"
    wait_for(lambda: os.path.exists(path) and pids())
    assert int(pathlib.Path(path).read_text()) == job.pid
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert not os.path.exists(path)


# ---- how jobs end -------------------------------------------------------------------------------------------------
def test_first_failing_rank_ends_the_job_with_its_code_and_last_words():
    script("""
helper()
if rank == 1:
    while len(open("pids").read().split()) < 6: time.sleep(0.01)
    print("line before"); sys.stderr.write("the reason\\n"); sys.exit(37)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
""")
    done = run("--num_gpus", 3, "train.py", DS_LAUNCHER_GRACE_S="0.5")
    assert done.returncode == 37
    story = done.stderr[done.stderr.index("deepspeed: rank") :]
    words = ("rank 1 of 3", "exit code 37", socket.gethostname(), "the other 2 were stopped")
    assert all(word in story for word in words), story
    assert story.splitlines()[1:5] == ["---- last lines of rank 1 ----", "line before", "the reason", "----"]
    assert_nobody_left(6, seconds=0)


def test_the_rest_ends_within_five_seconds():
    script("""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("ready%d" % rank, "w").close()
time.sleep(600)
""")
    job = start("--num_gpus", 2, "train.py", DS_LAUNCHER_GRACE_S="3")
    wait_until_ready()
    os.kill(pids()[0], signal.SIGKILL)
    wait_for(lambda: job.poll() is not None, 5)
    _, err = job.communicate()
    assert job.returncode == 128 + 9
    assert "SIGKILL" in err and "out-of-memory" in err and "wrote nothing" in err
    assert_nobody_left(2, seconds=0)


@pytest.mark.parametrize("name, code", [("SIGSEGV", 139), ("SIGABRT", 134)])
def test_a_signal_becomes_128_plus_its_number(name, code):
    script(f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), signal.{name})")
    done = run("--num_gpus", 1, "train.py")
    assert done.returncode == code and name in done.stderr


def test_the_others_may_tidy_up():
    script("""
def tidy(*_):
    print("tidied", rank); sys.exit(0)
signal.signal(signal.SIGTERM, tidy)
open("ready%d" % rank, "w").close()
while not all(os.path.exists("ready%d" % r) for r in (0, 1)): time.sleep(0.01)
if rank == 0: raise SystemExit(5)
time.sleep(600)
""")
    done = run("--num_gpus", 2, "train.py", DS_LAUNCHER_GRACE_S="600")  # nobody waits for the end of the grace
    assert done.returncode == 5 and "tidied 1" in done.stdout


def test_a_rank_that_is_done_early_ends_nothing():
    script("time.sleep(0.4 * rank); print('done', rank)")
    done = run("--num_gpus", 2, "train.py")
    assert done.returncode == 0 and "done 1" in done.stdout


def test_helpers_do_not_outlive_a_job_that_succeeded():
    script("helper()")
    assert run("--num_gpus", 2, "train.py").returncode == 0
    assert_nobody_left(4, seconds=0)


@pytest.mark.parametrize("sig, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_reaches_every_rank_once(sig, code):
    script("""
count = []
def heard(number, frame):
    count.append(number)
signal.signal(signal.SIGINT, heard); signal.signal(signal.SIGTERM, heard)
note(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
open("ready%d" % rank, "w").close()
while not count: time.sleep(0.01)
time.sleep(0.3)
print("heard", count)
""")
    job = start("--num_gpus", 2, "train.py")
    wait_until_ready()
    job.send_signal(sig)
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out) == (code, f"heard [{int(sig)}]\n" * 2), err
    assert_nobody_left(4, seconds=0)


def test_a_second_ctrl_c_ends_at_once():
    script("""
signal.signal(signal.SIGINT, signal.SIG_IGN); open("ready", "w").close(); time.sleep(600)
""")
    job = start("--num_gpus", 1, "train.py", DS_LAUNCHER_GRACE_S="60")
    wait_until_ready("ready")
    job.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    wait_for(lambda: job.poll() is not None, 5)
    job.communicate()
    assert job.returncode == 130
    assert_nobody_left(1, seconds=0)


def test_a_sigterm_that_all_processes_get_leaves_time_to_save():
    """As Slurm sends it to every process of a step: to supervisor, ranks and the launcher, which passes it on."""
    script("""
def save(*_):
    open("heard", "w").close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while not os.path.exists("go"): time.sleep(0.02)
    print("saved"); sys.exit(0)
signal.signal(signal.SIGTERM, save)
note(os.getppid()); open("ready", "w").close()
while True: time.sleep(0.02)
""")
    job = start("--num_gpus", 1, "train.py", DS_LAUNCHER_GRACE_S="600")
    wait_for(lambda: os.path.exists("ready"), 30)
    rank, supervisor = pids()
    os.kill(supervisor, signal.SIGTERM)
    wait_for(lambda: os.path.exists("heard"), 30)
    for pid in (rank, supervisor, job.pid):
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)  # long enough for the launcher to pass it on
    assert job.poll() is None
    open("go", "w").close()
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out) == (143, "saved\n"), err


def test_user_signals_are_passed_on():
    script("""
signal.signal(signal.SIGUSR1, lambda *_: (print("saved", rank), os._exit(0)))
open("ready%d" % rank, "w").close()
time.sleep(600)
""")
    job = start("--num_gpus", 2, "train.py")
    wait_until_ready()
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=60)
    assert job.returncode == 0


def test_ctrl_z_stops_the_ranks_and_fg_continues_them():
    script("open('ready', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)")
    job = start("--num_gpus", 1, "train.py")
    wait_until_ready("ready")
    job.send_signal(signal.SIGTSTP)
    wait_for(lambda: all(state_and_parent(pid)[0] == "T" for pid in (pids()[0], job.pid)))
    open("go", "w").close()
    time.sleep(0.2)
    assert state_and_parent(pids()[0])[0] == "T"
    job.send_signal(signal.SIGCONT)
    assert job.wait(60) == 0


def test_ignored_child_signal():
    script("raise SystemExit(4)")
    line = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, %r)"
    line %= command("--num_gpus", 1, "train.py")
    assert launching.run([sys.executable, "-c", line], environment()).returncode == 4


def test_a_program_that_calls_main_keeps_its_own_children():
    script("os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)")  # the worst case: the supervisor is killed
    pathlib.Path("caller.py").write_text("""
import subprocess, sys
from deepspeed.launcher.runner import main
mine = subprocess.Popen(["sleep", "60"])
code = main(["--num_gpus", "1", "train.py"])
print(code, mine.poll())
mine.kill()
""")
    done = launching.run([sys.executable, "caller.py"], environment())
    assert done.stdout == "137 None\n", done.stderr
    assert_nobody_left(1)


@pytest.mark.parametrize("who", ["launcher", "supervisor"])
def test_a_killed_launcher_leaves_nobody(who):
    script("""
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)
helper()
open("ready%d" % rank, "w").close()
time.sleep(600)
""")
    job = start("--num_gpus", 2, "train.py")
    wait_until_ready()
    (supervisor, *_) = children(job.pid)
    os.kill(job.pid if who == "launcher" else supervisor, signal.SIGKILL)
    assert_nobody_left(4)
    wait_for(lambda: not running(supervisor))
    job.communicate(timeout=60)
    assert job.returncode == (-9 if who == "launcher" else 137)


def test_nobody_reads_the_output():
    script("while True: print('x' * 1000)")
    job = start("--num_gpus", 1, "train.py")
    job.stdout.read(10)
    job.stdout.close()
    assert job.wait(60) == 128 + signal.SIGPIPE
    assert_nobody_left(1, seconds=0)


def test_nohup_is_respected():
    script("open('ready', 'w').close(); time.sleep(0.3); print('finished')")
    job = subprocess.Popen(
        command("--num_gpus", 1, "train.py"), env=environment(), stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    wait_for(lambda: os.path.exists("ready"))
    job.send_signal(signal.SIGHUP)
    assert job.communicate(timeout=60)[0] == "finished\n"


# ---- bad input ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "args, named",
    [
        (["nowhere.py"], "nowhere.py"),
        (["--no_python", "no-such-program"], "no-such-program"),
        (["--include", "localhost:99", "train.py"], "99"),
        (["--num_nodes", "2", "train.py"], "there is no hostfile"),
        (["--no_python", "./notes.txt"], "notes.txt"),
    ],
)
def test_errors_are_one_paragraph(args, named, folder):
    script("")
    (folder / "notes.txt").write_text("text")
    done = run(*args)
    assert done.returncode == 1 and named in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert pids() == []


def test_busy_port():
    script("print(os.environ['MASTER_PORT'])")
    with taken_port() as port:
        done = run("--master_port", port, "--num_gpus", 1, "train.py")
        assert done.returncode == 1 and f"port {port}" in done.stderr and "--master_port" in done.stderr
        assert pids() == []
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else has it: as good as we
            taken.bind(("", 29500))
            taken.listen(1)
        done = run("--num_gpus", 1, "train.py", MASTER_PORT="")
        assert done.returncode == 0 and done.stdout.strip() != "29500" and "29500" in done.stderr


def test_wrong_usage():
    assert run("--no_such_option", "train.py").returncode == 2 and run().returncode == 2
    assert "--num_accelerators" in run("--help").stdout


def test_the_launcher_starts_quickly():
    # In seconds of processor time, which other work on the machine stretches less than the clock's. The bound is a
    # multiple of what Python needs for modules of its own, so that it holds on slower processors.
    def seconds(*line):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(line, env=environment(), check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    modules = "import argparse, importlib.metadata, logging, shutil, signal, socket, subprocess"
    python = min(seconds(sys.executable, "-c", modules) for _ in range(5))
    whole = min(seconds(*command("--num_gpus", 1, "--no_python", "--no_local_rank", "true")) for _ in range(5))
    assert whole < 3 * python, f"{whole:.3f} s; Python alone {python:.3f} s"


def test_a_prompt_is_shown_before_its_line_ends():
    """The ranks write the rest of the line when their prompts have been seen here, and not before."""
    go = os.path.abspath("go")
    script(f"""
sys.stdout.write("proceed? ")
until = time.monotonic() + 50
while not os.path.exists({go!r}) and time.monotonic() < until:
    time.sleep(0.02)
sys.stdout.write("done\\n" if os.path.exists({go!r}) else "nobody came\\n")
""")
    job = start("--num_gpus", 2, "train.py", OMP_NUM_THREADS="1")
    assert job.stdout.read(18) == "proceed? proceed? "
    pathlib.Path(go).touch()
    assert job.communicate(timeout=60)[0] == "done\ndone\n"


A_FULL_BUFFER = """
if rank == 0:
    os.write(1, b"x" * 8191 + b"\\n" + b"half a ")
    time.sleep(0.6)
    os.write(1, b"line\\n")
else:
    for _ in range(80):
        print("other", flush=True)
        time.sleep(0.01)
"""
A_BLOCK_IN_PIECES = """
if rank == 0:
    os.write(1, b"x" * 8191 + b"\\n" + b"half")
    for piece in (b" a", b" line", b" in", b" pieces\\n"):
        time.sleep(0.2)
        os.write(1, piece)
    os.write(1, b"short\\nhalf")
    time.sleep(0.2)
    os.write(1, b" a line\\n")
else:
    for _ in range(120):
        print("other", flush=True)
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    "text, expected",
    [
        (A_FULL_BUFFER, ["half a line", "other", "x" * 8191]),
        (A_BLOCK_IN_PIECES, ["half a line", "half a line in pieces", "other", "short", "x" * 8191]),
    ],
    ids=["a full buffer", "a block in pieces"],
)
def test_half_a_line_waits_for_its_end(text, expected):
    script(text)
    lines = run("--num_gpus", 2, "train.py", OMP_NUM_THREADS="1").stdout.splitlines()
    assert sorted(set(lines)) == expected


def test_output_that_was_there_in_time_is_not_cut():
    # The launcher stands still (a loaded machine) between the two halves of a line.
    script("""
import signal
if rank == 0:
    print("x" * 5, end=" ", flush=True)
    supervisor = os.getppid()
    time.sleep(0.02)
    os.kill(supervisor, signal.SIGSTOP)
    time.sleep(0.3)
    print("y", flush=True)
    time.sleep(0.2)
    os.kill(supervisor, signal.SIGCONT)
else:
    time.sleep(0.25)
    print("other", flush=True)
""")
    assert sorted(run("--num_gpus", 2, "train.py", OMP_NUM_THREADS="1").stdout.splitlines()) == ["other", "xxxxx y"]


def test_a_machine_that_stood_still_does_not_cut_a_line():
    from deepspeed.launcher.output import Sink  # noqa: PLC0415

    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    sink = Sink(theirs, whole_lines=True)
    sink.write(b"half")
    sink.wait(10.0)  # the machine stood still, and with it the rank
    refused(BlockingIOError, "", os.read, ours, 100)
    sink.write(b" a line\n>>> ")
    assert os.read(ours, 100) == b"half a line\n"
    for _ in range(3):
        sink.wait(0.02)
    assert os.read(ours, 100) == b">>> "
    os.close(ours)
    os.close(theirs)
