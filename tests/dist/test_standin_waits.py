"""The audit of waits: of one step of training on the stand-in device, without and with a pipeline, each stream wait,
`record_stream` and wait of the host is left out in turn. An omission is missed where the device reports an access
without an order or the weights differ. A call that nothing misses in these runs is listed here with its reason."""

import bisect
import itertools
import re
import subprocess

import pytest
import standin
import standin_kernels
import torch

import deepspeed
import fake_nccl
import pipe_models
from deepspeed import _native
from engine_models import make_net, net_engine, train_engine
from harness import run_ranks
from runs import together, weights
from sampling import every_case

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")

MICRO_BATCHES = 3  # of a pipeline
STATES, PARAMS = {"offload_optimizer": {"device": "cpu"}}, {"offload_param": {"device": "cpu"}}
RUNS = [  # ranks, stage, section of ZeRO, with the CUDA kernels; two ranks are the stages of a pipeline over NCCL
    (1, 2, STATES, True),
    (2, 0, {}, True),
    (1, 3, {**STATES, **PARAMS}, True),
    (1, 1, {}, True),
    (1, 2, STATES, False),
    (1, 3, {}, False),
]
OTHER_STREAM = (
    "The call does nothing for the stream on which torch's allocator has made the memory, and steps of one rank use no "
    "other for memory that goes back to the allocator. tests/cpp/storage leaves it out where another stream does."
)
SECOND_WAIT = (
    "In these steps another wait puts the same work in order. tests/cpp/storage leaves it out where it is the only one."
)
TIMING = (
    "The thread of transfers takes memory that another stream has used in some runs, and only there it is missed. "
    "tests/cpp/storage leaves it out where the memory is that of another stream."
)
TIMES = "Only the step log reads the times of these events, so no value and no memory depends on the wait."
NEXT_MESSAGE = (
    "The next message of a pipeline takes other memory in most runs. tests/cpp/comm leaves the call out where the next "
    "message takes the memory."
)
NOT_MISSED = {
    ("kept memory", "PlaneTable::add_fence"): OTHER_STREAM,
    ("kept memory", "PlaneTable::wait_for_streams"): OTHER_STREAM,
    ("kept memory", "storage::used_here"): OTHER_STREAM,
    ("kept memory", "ScratchPool::give"): OTHER_STREAM,
    ("kept memory", "ScratchPool::take"): OTHER_STREAM,
    ("kept memory", "Leases::release"): OTHER_STREAM,
    ("kept memory", "Leases::copy_of"): OTHER_STREAM,
    ("kept memory", "Leases::write_back"): OTHER_STREAM,
    ("kept memory", "Prefetches::fetch"): OTHER_STREAM,
    ("stream wait", "PlaneTable::wait_for_streams"): SECOND_WAIT,
    ("stream wait", "Leases::copy_of"): SECOND_WAIT,
    ("stream wait", "ScratchPool::take"): TIMING,
    ("kept memory", "PipeInbox::take"): NEXT_MESSAGE,
    ("host wait", "StepWaits::take"): TIMES,
    ("host wait", "VirtualGuardImpl>::elapsedTime"): TIMES,
}
MISSED = {
    ("host wait", "DeviceContext::read_step_scale"),
    ("stream wait", "Leases::write_back"),
    ("stream wait", "PipeInbox::take"),
    ("stream wait", "PipeOutbox::serve"),
}


class Symbols:
    """Names of functions of the extension module, also of those that it does not export."""

    def __init__(self):
        listed = subprocess.run(["nm", "-Cn", _native._C.__file__], capture_output=True, text=True, check=True).stdout
        rows = [(int(line[:16], 16), line[19:]) for line in listed.splitlines() if line[:16].strip()]
        self.addresses, self.names = zip(*rows)

    def caller(self, stack):
        """The function of this project that made a call, below what only passes it on; None: torch or Python did."""
        for offset in re.findall(r"_C\.cpython[^(]*\(\+0x([0-9a-f]+)\)", stack):
            name = self.names[bisect.bisect_right(self.addresses, int(offset, 16)) - 1].split("(")[0]
            if "Fence" not in name:
                return "::".join(name.split("::")[-2:])
        return None


def engine_of(world, stage, zero):
    if world > 1:
        return pipe_models.engine_of("plain", world, world, MICRO_BATCHES)
    sizes = {"reduce_bucket_size": 300, "allgather_bucket_size": 200, "stage3_param_persistence_threshold": 20}
    return net_engine(1, stage, 2, model=make_net(), zero={**sizes, **zero})


def train(engine, world, steps, start):
    if world == 1:
        train_engine(engine, steps, 0, 1, start=start)
        return
    data = itertools.islice(pipe_models.batches("plain", start + steps, MICRO_BATCHES, 0), start * MICRO_BATCHES, None)
    for _ in range(steps):
        engine.train_batch(data)


def one_step(world, stage, zero, number=standin.LIST, kind=None):
    """The third step of an engine without one call, of a kind: the stacks of the calls that were left out or listed,
    ``{(kind, number): stack}``, what the device reported, the weights."""
    engine = engine_of(world, stage, zero)
    train(engine, world, 2, 0)
    standin.faults_at_end()
    for each in standin.WAITS:
        standin.leave_out(each, number if kind in (None, each) else 0)
    train(engine, world, 1, 2)
    calls = ((each, call) for each in standin.WAITS for call in range(1, standin.waits(each) + 1))
    stacks = {(each, call): stack for each, call in calls if (stack := standin.place(each, call))}
    for each in standin.WAITS:
        standin.leave_out(each, 0)
    found, values = standin.faults_at_end(), weights(engine) if world == 1 else pipe_models.parameters_of(engine)
    values = {name: value.float().cpu() for name, value in values.items()}
    engine.destroy()
    return stacks, found, values


def audit(rank, world, stage, zero, everything):
    """The kinds and functions of calls, and those of which an omission is missed. Unless ``everything``, calls of a
    function are left out until one is missed, and those of listed functions are not left out."""
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    standin.choose(1, lazy=True)
    stacks, found, expected = one_step(world, stage, zero)
    assert found == []
    symbols, missed = Symbols(), set()
    calls = together({call: symbols.caller(stack) for call, stack in stacks.items()})
    seen = {(kind, caller) for there in calls for (kind, _), caller in there.items() if caller}
    for owner, kind, number in [(owner, *call) for owner, there in enumerate(calls) for call in there]:
        caller = calls[owner][kind, number]
        if not everything and (caller is None or (kind, caller) in missed or (kind, caller) in NOT_MISSED):
            continue
        stacks, found, values = one_step(world, stage, zero, number if rank == owner else 0, kind)
        differs = any(not torch.equal(value, expected[name]) for name, value in values.items())
        left_out = {(kind, symbols.caller(stack)) for stack in stacks.values()}  # threads may change the order
        results = together((bool(found) or differs, left_out))
        if any(wrong for wrong, _ in results):
            missed.update(call for _, there in results for call in there)
    return seen, missed


def test_each_wait_of_a_step_is_missed_or_listed(tmp_path):
    missed, seen = set(), set()
    for world, stage, zero, cuda in RUNS if every_case() else RUNS[:2]:
        variables = {"DS_STANDIN_KERNELS": standin_kernels.library_path()} if cuda else {}
        if world > 1:
            variables["DS_STANDIN_NCCL"] = fake_nccl.build(tmp_path)
        options = {"init": world > 1, "fresh": True, "timeout": 900, "env": variables}
        there, found = run_ranks(world, audit, stage, zero, every_case(), **options)[0]
        seen |= there
        missed |= found
    needless = seen - missed - set(NOT_MISSED)
    assert not needless, f"nothing misses {sorted(needless)}: remove the wait, or list it with its reason"
    assert missed >= (MISSED if every_case() else MISSED & seen)
    if every_case():
        assert set(NOT_MISSED) <= seen, f"no longer there: {sorted(set(NOT_MISSED) - seen)}"
