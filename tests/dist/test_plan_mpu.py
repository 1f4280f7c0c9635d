"""Plans of engines with an mpu, and what is refused where an engine has one."""

from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.module_inject.layers import exchange_of
from deepspeed.planner import PlanError, child
from deepspeed.sequence import parallel_state
from harness import on_ranks
from models import seeded
from mpu import Mpu, two_by_two
from plan_calls import calls_of, calls_while, planned_calls
from refusals import refused
from runs import TORCH2, engine_of, settings, take_step

WIDTH = 64


class Sliced(torch.nn.Module):
    def __init__(self, group):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.group = group

    def forward(self, x):
        return exchange_of(self.group).sum_out(self.down(torch.tanh(self.up(exchange_of(self.group).copy_in(x)))))


def made():
    mpu = two_by_two(torch.distributed.get_rank())
    return seeded(Sliced, mpu.get_model_parallel_group()), mpu


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(4, init=True)
def test_the_calls_of_ranks_that_share_layers(rank, world, stage):
    """By the engine, whose layers and mpu have groups of this job, and by a function that makes others."""
    (model, mpu), sample = made(), torch.ones(2, WIDTH)
    engine = engine_of(model, settings(stage), mpu=mpu)
    take_step(engine, engine(sample).sum())
    ran = calls_of(calls_while(lambda: take_step(engine, engine(sample).sum())))
    assert ran["all_reduce"][0] >= 2, "of the layers"
    if not TORCH2:
        words = r"pass deepspeed.plan a function that makes the groups and returns \(model, mpu\), or use torch 2"
        refused(ValueError, words, engine.plan)
    else:
        assert planned_calls(engine.plan()) == ran
    assert calls_of(calls_while(lambda: take_step(engine, engine(sample).sum()))) == ran, "the job goes on"
    engine.destroy()
    assert planned_calls(deepspeed.plan(made, settings(stage), world, sample=sample, ranks=[rank])) == ran


@pytest.mark.skipif(not TORCH2, reason="a group of torch 1.13 cannot get another backend")
@on_ranks(4, init=True)
def test_the_plan_of_an_engine_whose_mpu_is_a_module(rank, world):
    """Its groups are known by name."""
    parallel_state.initialize_sequence_parallel(2)
    model = seeded(Sliced, parallel_state.get_sequence_parallel_group())
    engine = engine_of(model, settings(1), mpu=parallel_state)
    take_step(engine, engine(torch.ones(2, WIDTH)).sum())
    ran = calls_of(calls_while(lambda: take_step(engine, engine(torch.ones(2, WIDTH)).sum())))
    assert planned_calls(engine.plan()) == ran
    engine.destroy()


@pytest.mark.skipif(not TORCH2, reason="a group of torch 1.13 cannot get another backend")
@on_ranks(2, init=True)
def test_an_mpu_that_cannot_be_sent_to_a_new_process(rank, world):
    """On this device torch's autograd does not work in a forked process."""
    group = torch.distributed.group.WORLD
    engine = engine_of(seeded(Sliced, group), settings(1), mpu=Mpu(group))
    take_step(engine, engine(torch.ones(2, WIDTH)).sum())
    with mock.patch.object(child, "_has_autograd", return_value=False):
        refused(PlanError, "the model cannot be sent to a new process", engine.plan)
    engine.destroy()
