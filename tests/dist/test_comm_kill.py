"""Ranks that are killed at random points of random collectives: the others hear of it, and nothing is left behind."""

import json
import os
import pathlib
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import deepspeed
import deepspeed.comm
from harness import RankError, run_ranks
from held_memory import segments, settled
from refusals import refused
from sampling import every_case

KILLS = int(os.environ.get("DS_KILLS", 10 if every_case() else 4))
WORLD = 3


def one_collective(random_, rank):
    """The same sequence on all ranks."""
    kind, numel, root = (
        random_.randrange(6),
        random_.choice([1, 100, 5000, 300_000, 2_000_000]),
        random_.randrange(WORLD),
    )
    value = torch.ones(numel, dtype=random_.choice([torch.float32, torch.bfloat16, torch.int64]))
    calls = [
        lambda: dist.all_reduce(value),
        lambda: dist.broadcast(value, root),
        lambda: dist.all_gather([torch.empty_like(value) for _ in range(WORLD)], value),
        lambda: dist.reduce_scatter(torch.empty_like(value), [value] * WORLD),
        lambda: [work.wait() for work in [dist.all_reduce(part, async_op=True) for part in value.chunk(4)]],
        dist.barrier,
    ]
    calls[kind]()


def until_killed(rank, world, seed, folder):
    before = segments()
    deepspeed.init_distributed(dist_backend="shm", verbose=False)
    own = random.Random(seed)
    victim, moment = own.randrange(world), time.monotonic() + own.uniform(0.0, 0.08)
    shared = random.Random(seed + 1)
    dist.barrier()
    if rank == victim:
        threading.Timer(max(0.0, moment - time.monotonic()), os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            one_collective(shared, rank)
            moment = time.monotonic()
    except RuntimeError as error:
        text, seconds = str(error), time.monotonic() - moment  # since the last success: more than since the kill
    dist.destroy_process_group()
    time.sleep(0.3)  # the watch looks at a group for a moment
    settled(lambda: segments()[1], before[1])
    after = segments()
    told = {"victim": victim, "text": text, "seconds": seconds, "before": before, "after": after}
    pathlib.Path(folder, f"{seed}.{rank}").write_text(json.dumps(told), encoding="utf-8")


@pytest.mark.slow
def test_killed_ranks_are_named_and_nothing_is_left(tmp_path):
    worst = 0.0
    for seed in range(KILLS):
        caught = refused(
            RankError,
            "SIGKILL",
            run_ranks,
            WORLD,
            until_killed,
            seed,
            str(tmp_path),
            fresh=True,
            grace=15,
            env={"DS_COMM_TRACE_DIR": str(tmp_path)},
        )
        found = [json.loads(path.read_text()) for path in tmp_path.glob(f"{seed}.*")]
        assert len(found) == WORLD - 1, (seed, found, str(caught))
        for each in found:
            assert f"rank {each['victim']} (process" in each["text"] and "has ended" in each["text"], each
            assert each["after"][0] == 0 and each["after"][1] <= each["before"][1], each
            worst = max(worst, each["seconds"])
    print(f"{KILLS} kills; the slowest survivor failed {worst:.2f} s after its last success")
    assert worst < 5
