"""Groups that have ended leave nothing behind: no thread of gloo's, none of the store's."""

import os
import time

import torch

from deepspeed import comm as dist
from harness import run_ranks


def body(rank, world):
    torch.distributed.init_process_group("gloo")
    found = [None] * world
    dist.all_gather_object(found, rank)
    dist.barrier()
    torch.distributed.destroy_process_group()
    time.sleep(0.7)  # the watching thread has passed once more
    return len(os.listdir("/proc/self/task"))


def test_threads_of_ended_groups_end():
    counts = [run_ranks(2, body) for _ in range(4)]
    assert counts[-1] == counts[1], counts
