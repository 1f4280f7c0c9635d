"""The counts of the stand-in device, and its mode `null`, in which a program takes the time of its host alone."""

import time

import pytest
import standin
import standin_kernels
import torch

import deepspeed
from harness import run_ranks
from models import seeded
from runs import engine_of, settings, take_step

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")

WIDTH = 256
NOTHING = {
    "operations": 0, "kernels": 0, "collectives": 0, "copies": 0, "bytes to the device": 0, "bytes to the host": 0,
    "bytes on the device": 0, "events": 0, "stream waits": 0, "host waits": 0, "blocking copies": 0, "polls": 0,
    "allocations": 0, "releases": 0, "reservations": 0, "kept memory": 0,
}  # fmt: skip


def asks_for_a_number(tensor):
    return tensor.sum().item()


def lines_of(host, device, pinned, side):
    """Lines of a program, by their names."""
    return {
        "an operation": lambda: device.add_(1),
        "a result": lambda: device + 1,
        "a view": lambda: device.view(4, 8),
        "a kernel": lambda: standin.launch(lambda: None, "nothing"),
        "to the device": lambda: device.copy_(host),
        "from pinned memory": lambda: device.copy_(pinned, non_blocking=True),
        "to pinned memory": lambda: pinned.copy_(device, non_blocking=True),
        "to the host": lambda: device.cpu(),
        "on the device": lambda: device[:4].copy_(device[4:]),
        "a number": lambda: asks_for_a_number(device),
        "an event": lambda: torch.Event("standin").record(side),
        "a stream that waits": lambda: side.wait_stream(torch.standin.current_stream()),
        "a wait": torch.standin.synchronize,
        "a question": side.query,
        "memory of another stream": lambda: device.record_stream(side),
        "new memory": lambda: torch.empty(32 << 20, device="standin"),
        "nonzero": lambda: device.nonzero(),
    }


def calls_of_a_program(rank, world):
    """The counts of some lines, in each mode, and the stacks of their waits."""
    standin.load()
    found = []
    for null in (False, True):
        standin.choose(null=null)
        host, device = torch.ones(8, 4), torch.ones(8, 4, device="standin")
        pinned, side = torch.ones(8, 4).pin_memory(), torch.Stream("standin")
        lines = lines_of(host, device, pinned, side)
        for name in lines.keys() - {"new memory"}:
            lines[name]()
        torch.standin.synchronize()
        told = {}
        for name, line in lines.items():
            standin.reset_counts(stacks=True)
            line()
            told[name] = {key: number for key, number in standin.counts().items() if number}
            assert len(standin.host_waits()) == standin.counts()["host waits"]
            if name == "a number":
                assert "asks_for_a_number" in standin.host_waits()[0]
        standin.reset_counts()
        asks_for_a_number(device)
        assert standin.host_waits() == [] and set(standin.counts()) == set(NOTHING)
        found.append(told)
    return found


def test_each_call_counts():
    (run, null) = run_ranks(1, calls_of_a_program, fresh=True, env={"DS_STANDIN_STACKS": "python"})[0]
    size = 8 * 4 * 4
    made = {"allocations": 1, "releases": 1}
    waits = {"host waits": 1, "blocking copies": 1}
    expected = {
        "an operation": {"operations": 1},
        "a result": {"operations": 1, **made},
        "a view": {},
        "a kernel": {"kernels": 1},
        "to the device": {"copies": 1, "bytes to the device": size, **waits},
        "from pinned memory": {"copies": 1, "bytes to the device": size},
        "to pinned memory": {"copies": 1, "bytes to the host": size},
        "to the host": {"copies": 1, "bytes to the host": size, **waits},
        "on the device": {"copies": 1, "bytes on the device": size // 2},
        "a number": {"operations": 1, "copies": 1, "bytes to the host": 4, **made, **waits},
        "an event": {"events": 1},
        "a stream that waits": {"events": 1, "stream waits": 1},
        "a wait": {"host waits": 1},
        "a question": {"polls": 1},
        "memory of another stream": {"kept memory": 1},
        "new memory": {**made, "reservations": 1},
    }
    for name, counts in expected.items():
        assert run[name] == counts, name
        if name != "new memory":  # which the first round has reserved
            assert null[name] == counts, name
    assert run["nonzero"]["host waits"] == null["nonzero"]["host waits"] == 1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.float().square().mean()


def steps_in_each_mode(rank, world, stage):
    """Counts of a step that runs and of one in the mode `null`, with the processor time of each."""
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    engine = engine_of(seeded(Net), settings(stage, dtype="bf16", steps_per_print=None, gradient_clipping=1.0))
    x, found = torch.ones(64, WIDTH, device=engine.device, dtype=torch.bfloat16), []
    for null in (False, True):
        torch.standin.synchronize()
        before = engine.module.layers[1].weight.detach().cpu()
        standin.choose(null=null)
        for _ in range(3):
            take_step(engine, engine(x))
        torch.standin.synchronize()
        standin.reset_counts()
        begin = time.thread_time()
        for _ in range(2):
            take_step(engine, engine(x))
        took = time.thread_time() - begin
        found.append((standin.counts(), took, engine.global_steps, engine.skipped_steps))
        torch.standin.synchronize()
        standin.choose()
        if stage < 3:  # there they are elsewhere
            after = engine.module.layers[1].weight.detach().cpu()
            assert torch.equal(before, after) == null, "nothing has run"
    assert standin.faults_at_end() == []
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_does_not_run_makes_the_same_calls(stage):
    env = {"DS_STANDIN_KERNELS": standin_kernels.library_path()}
    run, null = run_ranks(1, steps_in_each_mode, stage, init=True, fresh=True, timeout=200, env=env)[0]
    memory = ("allocations", "releases", "reservations")
    assert {**run[0], **dict.fromkeys(memory)} == {**null[0], **dict.fromkeys(memory)}
    assert run[2:] == (5, 0) and null[2:] == (10, 0), "no step is skipped"
    assert run[0]["kernels"] > 0 and run[0]["host waits"] > 0
    assert null[1] < run[1]
