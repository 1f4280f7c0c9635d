"""The native format: a run goes on bit by bit at every stage, in every precision and at any number of ranks, and its
files are safetensors and JSON only."""

import glob
import json
import os

import pytest
import torch

import deepspeed
from deepspeed.checkpoint import listing, manifest, verify
from deepspeed.checkpoint.plain_json import NotPlain
from deepspeed.checkpoint.saved_state import open_saved
from deepspeed.utils.safetensors_file import read_safetensors
from engine_models import make_net
from harness import run_ranks
from test_checkpoint import PRECISIONS, repeat, run, same, seed_all
from test_zero_checkpoint import comparable, make_engine, train, weights

NATIVE = {"checkpoint": {"writer": {"format": "safetensors"}}}


def sgd(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def body_straight(rank, world, folder, stage, precision, client):
    engine, _, loader, _ = make_engine(world, stage, {**precision, **NATIVE}, optimizer=sgd if client else None)
    seed_all(7 + rank)
    batches = repeat(loader)
    train(engine, batches, 10)
    engine.save_checkpoint(folder, client_state={"epoch": 3, "best": torch.tensor([0.5, 2.0])})
    straight = train(engine, batches, 10)
    return straight[0], straight[1], comparable(straight[2])


def body_resumed(rank, world, folder, stage, precision, client):
    engine, _, loader, _ = make_engine(world, stage, {**precision, **NATIVE}, seed=5, optimizer=sgd if client else None)
    seed_all(99)
    path, client_state = engine.load_checkpoint(folder)
    assert path == os.path.join(folder, "global_step10", "checkpoint.json")
    assert client_state["epoch"] == 3 and torch.equal(client_state["best"], torch.tensor([0.5, 2.0]))
    assert client_state["ds_config"]["train_batch_size"] == 8
    resumed = train(engine, repeat(loader), 10)
    return resumed[0], resumed[1], comparable(resumed[2])


@pytest.mark.parametrize("client", [False, True], ids=["AdamW of ours", "SGD of torch"])
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resumes_bit_by_bit(stage, precision, client, tmp_path):
    given = str(tmp_path), stage, PRECISIONS[precision], client
    straight = run_ranks(2, body_straight, *given)
    resumed = run_ranks(2, body_resumed, *given)
    for (losses, params, states), (losses_2, params_2, states_2) in zip(straight, resumed):
        assert losses == losses_2
        assert same(params, params_2) and same(states, states_2)
    assert verify.verify_folder(str(tmp_path / "global_step10")) == []
    assert not glob.glob(f"{tmp_path}/**/*.pt", recursive=True) and not (tmp_path / "zero_to_fp32.py").exists()
