"""DSElasticAgent starts workers with the variables it was given."""

import inspect
import os
import sys

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

import deepspeed.elasticity
from deepspeed.host.ports import free_port

pytestmark = pytest.mark.dist

WORKER = """
import os, sys
names = "RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MINE".split()
open(sys.argv[1] + os.environ["RANK"], "w").write(" ".join(os.environ[name] for name in names))
"""


def test_the_published_signature():
    signature = inspect.signature(deepspeed.elasticity.DSElasticAgent)
    assert str(signature) == "(spec, env, start_method='spawn', exit_barrier_timeout=300, log_dir=None)"


def test_workers_find_the_variables(tmp_path, monkeypatch):
    monkeypatch.delenv("MINE", raising=False)
    where = RendezvousParameters(
        "c10d", f"localhost:{free_port()}", "run", 1, 1, is_host=True, join_timeout=30, last_call_timeout=1
    )
    backend, store = create_backend(where)
    spec = WorkerSpec(
        role="default", local_world_size=2, entrypoint=sys.executable, args=("-c", WORKER, str(tmp_path / "rank")),
        rdzv_handler=create_handler(store, backend, where), max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    agent = deepspeed.elasticity.DSElasticAgent(spec, {"MINE": "yes"}, log_dir=str(tmp_path))
    assert not agent.run().is_failed() and agent.ds_env == {"MINE": "yes"} and "MINE" not in os.environ
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["0 2 2 0 1 yes", "1 2 2 0 1 yes"]
