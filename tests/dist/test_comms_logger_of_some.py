"""The log of collectives is on in all ranks of an engine or in none: it changes the order in which a rank goes into the
collectives of several groups."""

import torch

import deepspeed
from deepspeed import comm
from harness import on_ranks, run_ranks
from refusals import refusing


def engine():
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    config["optimizer"] = {"type": "AdamW"}
    return deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]


@on_ranks(3, init=True)
def test_a_log_of_some_ranks_is_refused_on_all(rank, world):
    comm.configure(enabled=rank == 1)
    with refusing(ValueError, "comms_logger.enabled: false on ranks 0, 2, true on rank 1"):
        engine()
    comm.configure(enabled=True)
    engine().destroy()


def left_on(rank, world):
    before = comm.comms_log.comms_logger.enabled
    comm.configure(enabled=True)
    return before


def test_a_run_does_not_leave_it_on():
    for _ in range(2):
        assert run_ranks(2, left_on) == [False, False]
