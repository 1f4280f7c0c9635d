"""The time of the host in plans, and the memory that an engine on the CPU keeps between its steps."""

import os
import subprocess
import sys
import time

import pytest
import torch

import deepspeed
from deepspeed.planner import Machine
from deepspeed.planner.host_time import host_ns
from runs import settings

BUSY = 0.2  # seconds of the processor in each forward
RATES = {
    "name": "test", "flops": {"float32": 1e15}, "memory": 1e15, "operator_ns": 0, "inside": (0, 0), "between": (0, 0),
    "host": 0, "file": 0, "host_step": 0,
}  # fmt: skip


class Program(torch.nn.Module):
    """The host works, and waits as long, between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        end = time.thread_time() + BUSY
        while time.thread_time() < end:
            pass
        time.sleep(BUSY)
        return self.second(x)


def seconds(world=1, **more):
    machine = Machine(**{**RATES, **more})
    plan = deepspeed.plan(Program, settings(0), world, sample=torch.zeros(2, 4), machine=machine, ranks=[0])
    return plan.ranks[0].seconds


class TestHostTime:
    def test_the_program_counts_in_its_phase_and_waiting_does_not(self):
        found = seconds(host_ns=round(host_ns()), synchronous=True)
        assert BUSY <= found["forward"] < 2 * BUSY
        assert found["backward"] < BUSY

    def test_a_machine_whose_program_takes_no_time(self):
        assert seconds()["forward"] < BUSY / 10

    def test_a_slower_host_takes_longer(self):
        found = seconds(host_ns=3 * round(host_ns()), synchronous=True)
        assert found["forward"] >= 2.9 * BUSY

    def test_ranks_on_the_cpu_share_its_cores(self):
        given = {"world": 3 * len(os.sched_getaffinity(0)), "host_ns": round(host_ns())}
        assert seconds(synchronous=True, **given)["forward"] >= 2.9 * BUSY
        assert seconds(**given)["forward"] < 2 * BUSY

    def test_a_device_works_while_the_host_does(self):
        """The first layer takes twice as long as the program after it."""
        slow = {"operator_ns": int(2e9 * BUSY)}
        alone, both = seconds(**slow), seconds(**slow, host_ns=round(host_ns()))
        assert both["forward"] == pytest.approx(alone["forward"], abs=BUSY / 4)
        waits = seconds(**slow, host_ns=round(host_ns()), synchronous=True)
        assert waits["forward"] >= alone["forward"] + BUSY


STEPS = """
import resource, statistics
import torch, deepspeed
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(16)])
config = {"train_batch_size": 1 << 14, "optimizer": {"type": "AdamW"}}
engine = deepspeed.initialize(model=model, config=config)[0]
x = torch.zeros(1 << 14, 64)  # 4 MiB of each activation
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    engine.backward(engine(x).sum())
    engine.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print("faults", statistics.median_high([step() for _ in range(12)]))
"""


def faults_of_a_step(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    kept.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", **more)
    out = subprocess.run([sys.executable, "-c", STEPS], env=kept, check=True, capture_output=True, text=True).stdout
    return int(out.rpartition("faults ")[2])


class TestFreedMemory:
    def test_a_step_uses_the_memory_of_the_step_before(self):
        """The 16 activations are 16,384 pages. Some of the first steps still add a block or two."""
        assert faults_of_a_step() < 1024

    def test_settings_of_the_environment_stay(self):
        assert faults_of_a_step(MALLOC_TRIM_THRESHOLD_="131072") > 8192
