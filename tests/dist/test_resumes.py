"""Resumed runs against undisturbed ones, bit by bit: random places of the save, data that draw random numbers,
evaluation before the save, client states that come back, and other sizes of batches."""

import copy
import glob
import itertools
import json
import os
import random
import shutil

import numpy
import pytest
import torch

from cases import Case, over
from claims import goes_on
from deepspeed.checkpoint.layouts.names import latest_tag
from deepspeed.checkpoint.write import verify
from deepspeed.data.loader import ResumableDataLoader
from deepspeed.log import logger
from deepspeed.pipe import PipelineModule
from harness import on_ranks
from models import Parts
from runs import engine_of, identical, settings, weights
from sampling import every_case
from test_checkpoint import PRECISIONS

RUNS = 1000 if every_case() else 16
ROWS = 14


class Noise(torch.utils.data.Dataset):
    """Rows with numbers from all three generators, as augmentations draw them."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return torch.tensor([row, torch.rand(()).item(), random.random(), numpy.random.rand()])


def net():
    return Parts(
        lambda net, x: net.out(net.drop(torch.tanh(net.first(x)))).square().mean(),
        first=torch.nn.Linear(4, 4),
        drop=torch.nn.Dropout(0.3),
        out=torch.nn.Linear(4, 1),
    )


class Resumed:
    """Runs of one random configuration."""

    def __init__(self, seed, folder):
        draws = self.draws = random.Random(seed)
        self.stage, self.workers = draws.choice([0, 1, 2, 3]), draws.choice([0, 0, 0, 1, 2])
        self.rows, self.gas = draws.choice([1, 2, 3, 5]), draws.choice([1, 2, 3])
        self.before, self.after = draws.randrange(12), draws.randrange(1, 6)
        self.evaluates, self.state = draws.random() < 0.5, draws.choice(["none", "same", "copy", "json"])
        self.form = draws.choice(["torch", "safetensors"])
        self.folder = os.path.join(folder, str(seed))

    def start(self, seed):
        torch.manual_seed(seed)
        more = {"checkpoint": {"writer": {"format": self.form}}}
        more["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.1}}
        engine = engine_of(net(), settings(self.stage, self.rows, self.gas, **more))
        engine.training_dataloader = engine.deepspeed_io(Noise(), num_local_io_workers=self.workers)
        engine._data.start_window()
        return engine

    def batches(self, engine):
        for _ in itertools.count():
            yield from engine.training_dataloader

    def train(self, engine, batches, count):
        seen = []
        for batch in itertools.islice(batches, count):
            seen.append(batch)
            engine.backward(engine(batch))
            engine.step()
        return seen, weights(engine), engine.global_steps, engine.global_samples, engine.skipped_steps, engine.get_lr()

    def passed_on(self, engine):
        """The client state of an earlier load, handed to the save, as scripts do."""
        engine.save_checkpoint(self.folder, tag="first", client_state={"epoch": 1})
        _, state = engine.load_checkpoint(self.folder, tag="first")
        if self.state == "json":
            plain = {key: value for key, value in state.items() if isinstance(value, (int, float, str, dict, list))}
            state = json.loads(json.dumps(plain, default=str))
        return copy.deepcopy(state) if self.state == "copy" else state

    def check(self):
        engine, other = self.start(0), self.start(1)
        state = {} if self.state == "none" else self.passed_on(engine)
        batches = self.batches(engine)
        self.train(engine, batches, self.before * self.gas)
        state["epoch"] = 2
        if self.evaluates:
            engine.eval()
            for _ in range(3):
                engine(torch.ones(2, 4))
            engine.train()
        engine.save_checkpoint(self.folder, tag="t", client_state=state)
        wanted = self.train(engine, batches, self.after * self.gas)
        _, back = other.load_checkpoint(self.folder, tag="t")
        found = self.train(other, self.batches(other), self.after * self.gas)
        assert back["epoch"] == 2
        for index, (one, two) in enumerate(zip(found, wanted)):
            assert identical(one, two), (index, one, two)
        engine.destroy(), other.destroy()
        shutil.rmtree(self.folder)


@on_ranks(1, init=True, timeout=1200)
def test_random_resumes(rank, world, tmp_path):
    for seed in range(RUNS):
        try:
            Resumed(seed, str(tmp_path)).check()
        except BaseException as error:
            raise AssertionError(f"run {seed}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rows, ranks, at", [(2, 1, 7), (3, 1, 5), (3, 2, 3), (5, 1, 3), (14, 1, 1)])
def test_behind_the_last_batch_any_size_begins_the_next_epoch(rows, ranks, at, last):
    def loader(size, world):
        more = {"num_local_io_workers": 0, "data_parallel_world_size": world, "data_parallel_rank": 0}
        return ResumableDataLoader(list(range(ROWS)), size, False, None, dataloader_drop_last=last, **more)

    one = loader(rows, ranks)
    list(itertools.islice(one, len(one)))
    assert len(one) in (at, at - 1)
    for size, world in itertools.product((1, 2, 3, 7), (1, 2)):
        other = loader(size, world)
        other.load_state_dict(one.state_dict())
        assert list(other) == [] and other.epoch == 1 and len(list(other)) == len(other)


# ---- programs in cases -----------------------------------------------------------------------------------------------
@pytest.mark.any_device
@over("stage", dtype=sorted(PRECISIONS), client=[False, True], world=[1, 2], form=["torch", "safetensors"], at_least=10)
@on_ranks()
def test_resumes_bit_by_bit(rank, world, stage, dtype, client, form, folder):
    """``client``: the optimizer is torch's SGD."""
    fp16 = PRECISIONS["fp16"] if dtype == "fp16" else {}
    case = Case(stage, world, dtype, 2, more={"checkpoint": {"writer": {"format": form}}, **fp16})
    name = "drawn net, SGD of torch" if client else "drawn net"
    path, state = goes_on(rank, name, case, case, folder, tag=0.25)
    assert latest_tag(folder) == "0.25" and state["ds_config"]["train_batch_size"] == 4 * world
    if form == "torch":
        assert path.endswith("mp_rank_00_model_states.pt")
    else:
        assert path == os.path.join(folder, "0.25", "checkpoint.json") and verify.verify_folder(f"{folder}/0.25") == []
        assert not glob.glob(f"{folder}/**/*.pt", recursive=True) and not os.path.exists(f"{folder}/zero_to_fp32.py")


STATES = ["Adagrad of the config", "FusedSGD", "Lion of the config", "Lamb", "Muon"]


@pytest.mark.any_device
@over("stage", dtype=["fp32", "bf16"], name=STATES, at_least=7)
@on_ranks(2)
def test_states_of_optimizers_are_kept(rank, world, stage, dtype, name, folder):
    case = Case(stage, world, dtype)
    goes_on(rank, name, case, case, folder, 3, 3)


class NoisyLayer(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(1)


@on_ranks(1, init=True)
def test_a_pipeline_that_seeds_its_layers_goes_on(rank, world, tmp_path):
    def start(seed):
        torch.manual_seed(seed)
        layers = [NoisyLayer(4, 4), NoisyLayer(4, 1)]
        loss = lambda out, y: (out - y).square().mean()
        module = PipelineModule(layers, num_stages=1, loss_fn=loss, seed_layers=True)
        return engine_of(module, settings(0, 2, 3, optimizer="SGD"))

    def batch():
        while True:
            yield torch.ones(2, 4), torch.zeros(2, 1)

    def train(engine):
        return [engine.train_batch(batch()).item() for _ in range(3)]

    engine, other = start(0), start(1)
    train(engine)
    engine.eval_batch(batch())
    engine.save_checkpoint(tmp_path, tag="t")
    wanted = train(engine)
    engine.load_checkpoint(tmp_path, tag="t")
    other.load_checkpoint(tmp_path, tag="t")
    other.eval_batch(batch())  # counts no micro-batch of the training
    assert train(engine) == train(other) == wanted


@on_ranks(1, init=True)
def test_an_evaluation_with_gradients_is_no_window(rank, world, tmp_path):
    engine = engine_of(net(), settings(2, 2, 2))
    engine(torch.ones(2, 4))
    said = []
    logger.warning, kept = said.append, logger.warning
    try:
        engine.save_checkpoint(tmp_path, tag="t")
        engine.load_checkpoint(tmp_path, tag="t")
    finally:
        logger.warning = kept
    assert engine._window.trained == 0 and not any("accumulation window" in str(text) for text in said)
    engine.set_train_batch_size(6)
    assert engine.gradient_accumulation_steps() == 3
