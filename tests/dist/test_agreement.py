"""Values that all ranks must have alike: configurations at ``deepspeed.initialize``, and what scripts change later."""

import tempfile

import pytest

from engine_models import config, loss_on, make_net
from harness import on_ranks
from refusals import refused
from runs import engine_of


def make_engine(rank, stage=0, **more):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    given = {"train_batch_size": None, "gradient_clipping": 0.0, "zero_optimization": zero, **more}
    made = {name: value for name, value in config(world=2, **given).items() if value is not None}
    return engine_of(make_net(), made)


def take_step(engine):
    engine.backward(loss_on(engine, 0))
    engine.step()


DIFFERENT = {
    r"optimizer\.params\.lr: 0\.01 on rank 0, 0.05 on rank 1": lambda rank: {
        "optimizer": {"type": "AdamW", "params": {"lr": (0.01, 0.05)[rank]}}
    },
    "gradient_accumulation_steps: 1 on rank 0, 2 on rank 1": lambda rank: {"gradient_accumulation_steps": 1 + rank},
    "csv_monitor.enabled: true on rank 0, false on rank 1": lambda rank: {"csv_monitor": {"enabled": rank == 0}},
    r"gradient_clipping: 0\.0 on rank 0, 0\.5 on rank 1": lambda rank: {"gradient_clipping": 0.5 * rank},
    "zero_optimization.stage: 1 on rank 0, 2 on rank 1": lambda rank: {"zero_optimization": {"stage": 1 + rank}},
}


@pytest.mark.parametrize("words", DIFFERENT)
@on_ranks(2)
def test_configurations_that_differ(rank, world, words):
    refused(ValueError, words, make_engine, rank, **DIFFERENT[words](rank))


@on_ranks(2)
def test_what_ranks_report_may_differ(rank, world):
    csv = {"enabled": True, "output_path": tempfile.mkdtemp(prefix=f"rank{rank}-"), "job_name": "job"}
    take_step(make_engine(rank, csv_monitor=csv, wall_clock_breakdown=bool(rank)))


def rate(engine):
    engine.optimizer.param_groups[0]["lr"] = 0.5


def betas(engine):
    engine.optimizer.param_groups[0]["betas"] = (0.5, 0.999)


def clip(engine):
    engine.stepping.clip = 0.25


CHANGES = {
    r"lr of parameter group 0 is .* on rank 0 and 0\.5 on rank 1": rate,
    r"betas\[0\] of parameter group 0 is 0\.5 on rank 1 and .* on rank 0": betas,
    r"gradient_clipping is 0 on rank 0 and 0\.25 on rank 1": clip,
    r"gradient_accumulation_steps is 1 on rank 0 and 2 on rank 1": lambda engine: engine.set_train_batch_size(
        2 * engine.train_batch_size()
    ),
}


@pytest.mark.sample("values")
@pytest.mark.parametrize("words", CHANGES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_changes_on_one_rank(rank, world, stage, words):
    engine = make_engine(rank, stage)
    take_step(engine)
    if rank:
        CHANGES[words](engine)

    def go_on():
        for _ in range(2):
            take_step(engine)

    refused(RuntimeError, words, go_on)
