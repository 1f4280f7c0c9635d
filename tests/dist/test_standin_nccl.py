"""The library that stands in for NCCL, on the stand-in device: it knows that a device grows its memory, and which of
its operations hosts and other streams wait for. tests/cpp/comm/fake_nccl/fake_nccl.h says what it makes of that."""

import time

import pytest
import standin
import torch
import torch.distributed

import deepspeed
import fake_nccl
from deepspeed.comm.nccl import NcclCommunicator
from harness import run_ranks
from refusals import refused

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")


def communicators(count):
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    standin.choose(1)
    made = [NcclCommunicator(name=f"number {number}") for number in range(count)]
    return made, fake_nccl.Orders(made[0].library)


def on_two_ranks(body, folder):
    env = {"DS_STANDIN_NCCL": fake_nccl.build(folder), "FAKE_NCCL_JOB": folder.name}
    return run_ranks(2, body, init=True, fresh=True, env=env)


def waits_for_what_runs(rank, world):
    """Whether rank 1 had received when rank 0 had memory that was cached, and when it had memory that was not."""
    (comm,), orders = communicators(1)
    store = torch.distributed.distributed_c10d._get_default_store()
    value = torch.ones(4, device="standin")
    if rank == 1:
        store.wait(["allocates"])
        time.sleep(0.2)
        store.set("receives", "1")
        comm.recv(value, 0)
        comm.wait(30)
        return None
    cached = torch.empty(1 << 14, device="standin")
    del cached
    comm.send(value, 1)
    while orders.count("most running") == 0:
        time.sleep(0.001)
    kept = [torch.empty(1 << 14, device="standin")]
    received = [store.check(["receives"])]
    store.set("allocates", "1")
    kept.append(torch.empty(1 << 22, device="standin"))
    received.append(store.check(["receives"]))
    comm.wait(30)
    return received, orders.report()


def test_memory_that_grows_waits_for_the_operations_that_run(tmp_path):
    assert on_two_ranks(waits_for_what_runs, tmp_path)[0] == ([False, True], "")


def hosts_wait(rank, world):
    """Each host waits for its send, by a stream that waits for the one of the send, and would receive afterwards."""
    comms, orders = communicators(2)
    value, side = torch.ones(4, device="standin"), torch.standin.Stream()
    side.wait_stream(torch.standin.current_stream())
    with torch.standin.stream(side):
        comms[rank].send(value, 1 - rank)
    torch.standin.current_stream().wait_stream(side)
    torch.standin.current_stream().synchronize()
    return told(comms, orders)


def streams_wait(rank, world):
    """On each rank the stream of the receive waits for that of the send, which nobody receives therefore."""
    comms, orders = communicators(2)
    value, other, side = torch.ones(4, device="standin"), torch.ones(4, device="standin"), torch.standin.Stream()
    comms[rank].send(value, 1 - rank)
    side.wait_stream(torch.standin.current_stream())
    with torch.standin.stream(side):
        comms[1 - rank].recv(other, 1 - rank)
    torch.standin.synchronize()
    return told(comms, orders)


def told(comms, orders):
    for comm in comms:
        refused(RuntimeError, "internal error", comm.wait, 30)
    return orders.report()


@pytest.mark.parametrize(
    "body, text",
    [
        (hosts_wait, "wait for each other in a circle, hosts among them\n"),
        (streams_wait, "wait for each other in a circle\n"),
    ],
)
def test_a_circle_of_waits_ends_the_job(body, text, tmp_path):
    for report in on_two_ranks(body, tmp_path):
        assert text in report
