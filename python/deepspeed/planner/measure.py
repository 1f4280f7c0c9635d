"""The program that ``ds_plan --profile-machine`` starts on every rank. It measures collectives by size, and rank 0
writes a machine file."""

import argparse
import os
import time

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import mesh
from deepspeed.planner.machine import here

SIZES = [1 << power for power in range(10, 25, 2)]  # bytes
TRIES = 5


def _seconds(group, size, device):
    """The best time of an all-reduce of ``size`` bytes."""
    value, best = torch.zeros(size // 4, device=device), float("inf")
    for _ in range(TRIES):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(value, group=group)
        get_accelerator().synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def _link(group, ranks, device):
    """``(nanoseconds of a round, bytes per second)``: from the smallest and from the largest call."""
    times = [_seconds(group, size, device) for size in SIZES]
    rounds = max(1, (ranks - 1).bit_length())
    sent = 2 * SIZES[-1] * (ranks - 1) / ranks
    return round(1e9 * times[0] / rounds), sent / max(1e-9, times[-1] - times[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    dist.init_distributed(verbose=False)
    device = torch.device(get_accelerator().current_device_name())
    size = dist.get_world_size()
    if size == 1:  # Links stay assumed.
        here().save(args.path)
        return
    local = int(os.environ.get("LOCAL_SIZE", size))
    inside = between = _link(None, size, device)
    if local < size:
        first = dist.get_rank() // local * local
        inside = _link(mesh.group_over(range(first, first + local)), local, device)
    if dist.get_rank() == 0:
        made = here(inside, between, ranks_of_host=local if local < size else 0)
        made.name = f"{get_accelerator().device_name()} of {size} ranks"
        made.save(args.path)
    dist.barrier()


if __name__ == "__main__":
    main()
