"""A forked child that leaves by ``sys.exit`` runs destructors and exit handlers: what they close is the parent's."""

import json
import os
import socket
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))


def run_job(world, *args):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        env = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        }
        command = [sys.executable, os.path.join(HERE, "forking_rank.py"), *map(str, args)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    found = []
    for rank in ranks:
        try:
            text = rank.communicate(timeout=120)[0]
        finally:
            rank.kill()
        found.append((rank.returncode, text))
    return found


@pytest.mark.parametrize(
    "backend, stage, device", [("gloo", 3, None), ("shm", 1, None), ("gloo", 2, "cpu"), ("gloo", 3, "nvme")]
)
def test_a_forked_child_that_drops_its_engine_closes_nothing_of_its_parent(backend, stage, device, tmp_path):
    rests = {"device": device, "nvme_path": str(tmp_path)}  # threads that transfer wait while the child ends
    found = run_job(2, backend, stage, json.dumps({"offload_optimizer": rests} if device else {}))
    for code, text in found:
        assert code == 0, text
    last = [text.strip().splitlines()[-1] for _, text in found]
    assert last[0] == last[1] and last[0].startswith("went on: ")
