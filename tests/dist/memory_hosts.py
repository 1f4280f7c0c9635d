"""Hosts as far as their memory goes: a keeper for each, in a process that stands for their agents."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
_AGENT = """
import json, sys
from deepspeed.launcher.memory_keeper import MemoryKeeper
keepers = [MemoryKeeper(place) for place in sys.argv[1:]]
print(json.dumps([[one.variables, one.pid] for one in keepers]), flush=True)
sys.stdin.read()
for one in keepers:
    one.close()
"""


@contextlib.contextmanager
def memory_hosts(count, code=0):
    """``[(variables, pid of the keeper), ...]`` of ``count`` hosts. ``code``: how the agents end."""
    places = [tempfile.mkdtemp(prefix="ds-test-memory-", dir="/dev/shm") for _ in range(count)]
    env = {**os.environ, "PYTHONPATH": os.path.join(HERE, "..", "..", "python")}
    agent = subprocess.Popen(
        [sys.executable, "-c", _AGENT, *places], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield [tuple(one) for one in json.loads(agent.stdout.readline())]
        agent.stdin.close()
        assert agent.wait(30) == code
        assert [os.listdir(place) for place in places] == [[]] * count  # nothing is left
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
