"""Faults of one rank: calls that it makes instead of the collective that the others call."""

import ctypes
import os
import signal
import time

import torch


def other_call(dist, rank, fault, seconds, device="cpu"):
    """Rank 1 does what ``fault`` says, all others ``all_reduce`` with ten numbers. ``dist``: the module of the calls;
    ``seconds``: how long rank 1 stays away, where that is the fault; ``device``: of the numbers."""
    if rank != 1:
        dist.all_reduce(torch.ones(10, device=device))
    elif fault == "skip":
        dist.barrier()
    elif fault == "shape":
        dist.all_reduce(torch.ones(11, device=device))
    elif fault == "dtype":
        dist.all_reduce(torch.ones(10, dtype=torch.float64, device=device))
    elif fault == "order":
        dist.broadcast(torch.ones(10, device=device), 0)
    elif fault == "exception":
        raise ValueError("rank 1 has had enough")
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "endless":
        time.sleep(seconds)
    elif fault == "deaf":
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # with the interpreter's lock
    elif fault == "slow":
        time.sleep(seconds)
        dist.all_reduce(torch.ones(10, device=device))
