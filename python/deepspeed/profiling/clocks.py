"""One clock for the ranks of a job: how far the clocks of its hosts are apart."""

import hashlib
import time

import torch

from deepspeed import _native

ROUNDS = 30


def aligned(communicator, host=None, now=time.perf_counter):
    """``(offset, error)`` of this rank, in seconds: ``now() - offset`` is the time of rank 0's host, wrong by at most
    ``error``. Every rank of ``communicator`` calls it.

    Ranks with the same ``host`` (by default: whoever shares memory) share a clock. The first rank of each other host
    and rank 0 send each other messages; of the round that was shortest, the answer was made between its ends.
    """
    rank, size = communicator.rank, communicator.size
    host = _native._C.host_id() if host is None else host
    mine = torch.tensor([_number_of(host)], dtype=torch.int64)
    hosts = torch.zeros(size, 1, dtype=torch.int64)
    communicator.run("all_gather", input=mine, output=hosts, tag="hosts").wait()
    leaders = {}
    for each, name in enumerate(hosts[:, 0].tolist()):
        leaders.setdefault(name, each)
    found = torch.zeros(size, 2, dtype=torch.float64)  # of leaders
    for leader in sorted(leaders.values()):
        if leader != 0 and rank in (0, leader):
            measured = _ping_pong(communicator, leader, now)
            if rank == leader:
                found[rank] = torch.tensor(measured, dtype=torch.float64)
    communicator.run("all_reduce", output=found, op="sum", tag="clocks").wait()
    return tuple(found[leaders[int(mine)]].tolist())


def _number_of(text):
    """The same number of a text in every process."""
    return int.from_bytes(hashlib.sha256(str(text).encode()).digest()[:8], "little", signed=True)


def _ping_pong(communicator, leader, now):
    """Rank 0 answers with its time; the leader returns its offset and half of the shortest round."""
    stamp, best = torch.zeros(1, dtype=torch.float64), (0.0, float("inf"))
    for _ in range(ROUNDS):
        if communicator.rank == 0:
            communicator.run("recv", output=stamp, peer=leader, tag="clock").wait()
            stamp[0] = now()
            communicator.run("send", input=stamp, peer=leader, tag="clock").wait()
            continue
        begin = now()
        communicator.run("send", input=stamp, peer=0, tag="clock").wait()
        communicator.run("recv", output=stamp, peer=0, tag="clock").wait()
        end = now()
        if (end - begin) / 2 < best[1]:
            best = (begin + end) / 2 - stamp.item(), (end - begin) / 2
    return best
