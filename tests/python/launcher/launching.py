"""Starts the launcher for tests: its command line, an environment without what others have set, and jobs with pipes."""

import os
import signal
import subprocess
import sys

from places import PYTHON

CLUSTER = "NODE_RANK JOB_COMPLETION_INDEX SLURM_NODEID GROUP_RANK SLURM_NNODES MASTER_ADDR MASTER_PORT".split()
# The width of a terminal is asked of the terminal only where no variable says it.
LEFT_OUT = {*CLUSTER, *"DS_LOG_LEVEL COLUMNS LINES KMP_AFFINITY OMP_NUM_THREADS WORLD_SIZE RANK".split()}
LEFT_OUT |= {"DS_LAUNCHER_SOCKET"}


def command(*args, module="deepspeed.launcher"):
    return [sys.executable, "-m", module, *map(str, args)]


def environment(**more):
    env = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    return {**env, "PYTHONPATH": PYTHON, "DS_ACCELERATOR": "cpu", **more}


def run(line, env, timeout=60, input=None):
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=timeout, input=input)


def start(line, env):
    """It hears Ctrl-C: a test run under nohup, or behind &, has it ignored."""
    return subprocess.Popen(
        line, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
