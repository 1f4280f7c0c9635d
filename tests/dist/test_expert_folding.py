"""Experts of an unchanged model that ranks share beside layers that they cut (``expert_parallel`` with
``tensor_parallel.autotp_size``): against the same model in one process."""

import os

import pytest
import torch

from auto_ep_runs import config, steps_of, train_one
from folded_models import folded_model_of
from harness import run_ranks
from runs import engine_of


def folded(world, stage, ep_size, **more):
    more = {"tensor_parallel": {"autotp_size": 2}, **more}
    return config(world, stage, ep_size, **more)


def training_body(rank, world, cases, expected):
    for family, form, stage, ep_size, more in cases:
        engine = engine_of(folded_model_of(family, form), folded(world, stage, ep_size, **more))
        losses, params = expected[family, form]
        data = engine.parallel.dp_rank
        own = steps_of(engine, data, len(losses))
        print(rank, family, form, stage, ep_size, own, [step[data] for step in losses], flush=True)
        assert own == pytest.approx([step[data] for step in losses], abs=3e-6), (family, form, stage, ep_size)
        engine.destroy()


def test_try():
    world = int(os.environ["W"])
    cases = [("mixtral", "listed", s, e, {}) for s in (0, 1, 2, 3) for e in ([2, 1, 4] if world == 4 else [2, 1])]
    expected = {case[:2]: train_one(case[0], world // 2, 3, make=folded_model_of, form=case[1]) for case in cases}
    run_ranks(world, training_body, cases, expected, init=True)
