"""A parameter that is touched while another rank is still at its step: the interpreter goes on meanwhile."""

import threading
import time

import torch
from torch.distributed import distributed_c10d

import deepspeed
from harness import run_ranks


class Touching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.before = lambda: None

    def forward(self, x):
        self.before()
        return x @ self.inner.weight.t()  # not the module that owns it: found by being touched


class LateAtTheEnd:
    """A core whose step ends when another rank says so."""

    def __init__(self, core, store):
        self._core, self._store = core, store

    def __getattr__(self, name):
        return getattr(self._core, name)

    def end_step(self):
        self._store.wait(["go"])
        return self._core.end_step()


def body(rank, world):
    store = distributed_c10d._get_default_store()
    torch.manual_seed(0)
    model = Touching()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert engine.core.gatherer.source == "peer memory"
    if rank == 1:
        engine.stepping.core = LateAtTheEnd(engine.core, store)
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    if rank == 0:
        waiting = threading.Event()

        def release_the_other():
            waiting.wait()
            time.sleep(0.2)  # the touch is waiting for rank 1 by now
            store.set("go", "")

        thread = threading.Thread(target=release_the_other)
        thread.start()
        model.before = waiting.set
    loss = engine(torch.ones(1, 8)).sum()
    if rank == 0:
        thread.join()
    return float(loss)


def test_touching_a_parameter_does_not_stop_other_threads():
    found = run_ranks(2, body, init=True, timeout=60)
    assert found[0] == found[1]
