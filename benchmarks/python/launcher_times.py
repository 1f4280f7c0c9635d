"""Times of the launcher: until a rank runs, until ranks of 64 hosts run, and from a kill to the next step.

    python benchmarks/python/launcher_times.py [--runs 5] [--hosts 64] [--json FILE]

Hosts are pretended: the ``ssh`` of the launcher's tests runs what it is given here, so that what is measured is the
launcher alone, with all its agents on this machine. Goals: ``head_ms`` 150 (from the start of the program to that of
the rank, without what Python itself takes to start), ``hosts_s`` 5 (until the rank of the last of 64 hosts runs), and
from a kill to the end of the next step: what it takes to notice (nothing for a rank, five seconds for a host that is
silent) plus the time to load the checkpoint plus 2 s. Exit code 1 where a goal is missed.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
TESTS = os.path.join(ROOT, "tests", "dist")
sys.path[:0] = [HERE, os.path.join(ROOT, "tests", "python", "launcher")]

import stand_ins  # noqa: E402  (the line above finds it from any directory)
from common import machine  # noqa: E402

TRAIN = """
import json, os, sys, time
sys.path.insert(0, sys.argv[-1])
import deepspeed
from engine_models import elastic_step, make_net
engine = deepspeed.initialize(model=make_net(), config={
    "elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2, 4], "version": 0.1},
    "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}})[0]
start = time.time()
engine.load_checkpoint("saved")
loaded = time.time() - start
while not os.path.exists("stop"):
    elastic_step(engine)
    engine.save_checkpoint("saved")
    with open("steps%d" % engine.global_rank, "a") as file:
        agent = open("/proc/%d/stat" % os.getppid()).read().rsplit(")", 1)[1].split()[1]
        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        file.write(json.dumps([restart, time.time(), loaded, os.getpid(), int(agent)]) + "\\n")
"""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def environment():
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR", "DS_LAUNCHER_SOCKET", "DS_LOG_LEVEL")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"PATH": f"{os.path.abspath('bin')}:{env['PATH']}", "STAND_IN_LOG": os.path.abspath("log")}
    return {**env, "PYTHONPATH": os.path.join(ROOT, "python"), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def start(*words):
    line = [sys.executable, "-m", "deepspeed.launcher", *map(str, words)]
    with open("said", "wb") as said:
        return subprocess.Popen(line, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said)


def started_after(*words):
    """Seconds from the start of the launcher to the last of its ranks, which are ``date``."""
    begin = time.time()
    job = start(*words, "--no_python", "--no_local_rank", "date", "+%s.%N")
    times = [float(line.split()[-1]) for line in job.stdout.read().splitlines()]
    if job.wait():
        sys.exit(open("said").read())
    return max(times) - begin


def head_ms(runs):
    """Without the start of Python."""
    python = []
    for _ in range(runs):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], env=environment(), check=True)
        python.append(time.perf_counter() - begin)
    return 1e3 * (statistics.median(started_after("--num_gpus", 1) for _ in range(runs)) - statistics.median(python))


def steps(rank):
    try:
        with open(f"steps{rank}", encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return []


def wait_for(found, what):
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        if found():
            return
        time.sleep(0.02)
    sys.exit(f"{what} did not come within 120 s; the launcher says:\n{open('said').read()}")


def kill_to_step(whom, number):
    """``(seconds from the kill to the end of the next step, of which the checkpoint was loaded)``."""
    with open("hosts", "w", encoding="utf-8") as file:
        file.write("198.18.0.1 slots=1\n198.18.0.2 slots=1\n")
    with open("train.py", "w", encoding="utf-8") as file:
        file.write(TRAIN)
    job = start("--elastic_training", "-H", "hosts", "train.py", TESTS)
    wait_for(lambda: steps(1), "the first step")
    time.sleep(8.0)  # the agents have their warm processes by now
    _, _, _, rank, agent = steps(1)[-1]
    killed = time.time()
    os.kill(rank if whom == "rank" else agent, number)
    wait_for(lambda: steps(0)[-1][0] > 0, "the next step")
    _, end, loaded, _, _ = next(row for row in steps(0) if row[0] > 0)
    open("stop", "w").close()
    if whom == "agent":
        os.kill(job.pid, signal.SIGTERM)  # the host would come back
    job.wait(60)
    return end - killed, loaded


def main():
    args = parse_arguments()
    figures, goals = {"hosts": args.hosts}, {"head_ms": 150.0, "hosts_s": 5.0}
    home = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        stand_ins.install("bin")
        figures["head_ms"] = head_ms(args.runs)
        with open("hosts", "w", encoding="utf-8") as file:
            # Addresses, kept free for tests: looking up names takes what the network takes.
            file.writelines(f"198.18.{host // 256}.{host % 256} slots=1\n" for host in range(1, args.hosts + 1))
        hosts = ("-H", "hosts", "--launcher", "ssh")
        figures["hosts_s"] = statistics.median(started_after(*hosts) for _ in range(min(3, args.runs)))
        os.chdir(home)
    for name, whom, number, notice in (
        ("rank_killed_s", "rank", signal.SIGKILL, 0),
        ("host_killed_s", "agent", signal.SIGKILL, 0),
        ("host_silent_s", "agent", signal.SIGSTOP, 5),
    ):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            stand_ins.install("bin")
            figures[name], loaded = kill_to_step(whom, number)
            figures[name.replace("_s", "_load_s")] = loaded
            goals[name] = notice + loaded + 2.0
            os.chdir(home)
    missed = [name for name, goal in goals.items() if figures[name] > goal]
    for name, goal in goals.items():
        print(f"{name:16} {figures[name]:8.2f}   goal {goal:.2f}{'   MISSED' if name in missed else ''}")
    if args.json:
        machine.write_json(args.json, "launcher_times", {**figures, "goals": goals})
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
