"""A parameter that is touched before another rank has come as far: the interpreter goes on while it waits."""

import os
import threading
import time

import torch
from torch.distributed import distributed_c10d

from harness import run_ranks
from runs import engine_of, settings


class Touching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.before = lambda: None

    def forward(self, x):
        self.before()
        return x @ self.inner.weight.t()  # not the module that owns it: found by being touched


def body(rank, world):
    store = distributed_c10d._get_default_store()
    torch.manual_seed(0)
    model = Touching()
    os.environ["DS_PEER_MEMORY"] = "0"  # as between hosts: every gather needs all ranks
    try:
        engine = engine_of(model, settings(3, 1, rate=1e-3))
    finally:
        del os.environ["DS_PEER_MEMORY"]
    assert engine.core.gatherer.source == "scheduled collectives"
    if rank == 1:
        store.wait(["go"])
        return float(engine(torch.ones(1, 8)).sum())
    waiting = threading.Event()

    def release_the_other():
        waiting.wait()
        time.sleep(0.2)  # the touch is waiting for rank 1 by now
        store.set("go", "")

    thread = threading.Thread(target=release_the_other)
    thread.start()
    model.before = waiting.set
    loss = float(engine(torch.ones(1, 8)).sum())
    thread.join()
    return loss


def test_touching_a_parameter_does_not_stop_other_threads():
    found = run_ranks(2, body, init=True, timeout=60)
    assert found[0] == found[1]
