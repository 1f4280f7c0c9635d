"""Plans of engines with an mpu, and what is refused where an engine has one."""

import pytest
import torch

import deepspeed
from harness import on_ranks
from models import seeded
from mpu import two_by_two
from plan_calls import calls_of, calls_while, planned_calls
from refusals import refused
from runs import engine_of, settings, take_step
from tensor_parallel import AddedUp, Copied

WIDTH = 64


class Sliced(torch.nn.Module):
    def __init__(self, group):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.group = group

    def forward(self, x):
        return AddedUp.apply(self.down(torch.tanh(self.up(Copied.apply(x, self.group)))), self.group)


def made():
    mpu = two_by_two(torch.distributed.get_rank())
    return seeded(Sliced, mpu.get_model_parallel_group()), mpu


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(4, init=True)
def test_the_calls_of_ranks_that_share_layers(rank, world, stage):
    (model, mpu), sample = made(), torch.ones(2, WIDTH)
    engine = engine_of(model, settings(stage), mpu=mpu)
    take_step(engine, engine(sample).sum())
    ran = calls_of(calls_while(lambda: take_step(engine, engine(sample).sum())))
    words = r"pass deepspeed.plan a function that makes the groups and returns \(model, mpu\)"
    refused(ValueError, words, engine.plan)
    engine.destroy()
    plan = deepspeed.plan(made, settings(stage), world, sample=sample, ranks=[rank])
    assert planned_calls(plan) == ran
