"""Native optimizers inside ZeRO: their states in checkpoints."""

import pytest
import torch

from harness import on_ranks
from models import seeded
from programs import OPTIMIZERS
from runs import load_into, take_step, weights
from zero_training import Deep, loss_on, start

pytestmark = pytest.mark.any_device


def make_engine(model, optimizer, stage, narrow):
    more = {"communication_data_type": "fp32", "bf16": {"enabled": narrow}, "zero": {"audit_steps": 2}}
    client = {"client": optimizer, "zero_allow_untested_optimizer": False}
    return start(model, stage, 2, None, **({"optimizer": optimizer} if isinstance(optimizer, dict) else client), **more)


def train(engine, rank, steps, first=0):
    for step in range(first, first + steps):
        take_step(engine, loss_on(engine, step, rank))
    return engine


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("case", ["Adagrad of the config", "FusedSGD", "Lion of the config"])
@on_ranks(2)
def test_checkpoints_keep_the_states(rank, world, case, stage, folder):
    optimizer = OPTIMIZERS[case].optimizer
    engine = train(make_engine(seeded(Deep), optimizer, stage, narrow=True), rank, 3)
    engine.save_checkpoint(folder, tag="here")
    train(engine, rank, 3, first=3)
    expected = weights(engine)
    other = train(load_into(make_engine(Deep(), optimizer, stage, narrow=True), folder, tag="here"), rank, 3, first=3)
    found = weights(other)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
