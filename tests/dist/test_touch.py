"""A parameter that is touched before another rank has come as far: the interpreter goes on while it waits."""

import threading
import time

import torch
from torch.distributed import distributed_c10d

from harness import on_ranks
from models import Parts, seeded
from runs import engine_of, settings, together


def forward_touching(net, x):
    net.before()
    return x @ net.inner.weight.t()  # not the module that owns it: found by being touched


def touching():
    return Parts(
        forward_touching,
        inner=torch.nn.Linear(8, 8),
        before=lambda: None,
    )


@on_ranks(2, init=True, timeout=60, env={"DS_PEER_MEMORY": "0"})  # as between hosts: every gather needs all ranks
def test_touching_a_parameter_does_not_stop_other_threads(rank, world):
    store = distributed_c10d._get_default_store()
    model = seeded(touching)
    engine = engine_of(model, settings(3, 1, rate=1e-3))
    assert engine.core.gatherer.source == "scheduled collectives"
    waiting = threading.Event()

    def release_the_other():
        waiting.wait()
        time.sleep(0.2)  # the touch is waiting for rank 1 by now
        store.set("go", "")

    if rank == 1:
        store.wait(["go"])
    else:
        threading.Thread(target=release_the_other).start()
        model.before = waiting.set
    first, second = together(float(engine(torch.ones(1, 8)).sum()))
    assert first == second
