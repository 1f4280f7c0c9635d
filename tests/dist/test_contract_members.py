"""Every member that clients and other people's tests touch, by the list in ``tests/python/data/engine_members.json``:
``{class: {member: signature, or "attribute"}}``. Attributes are asked of an object in use."""

import json
import os
import pathlib
import sys

import pytest
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "python"))

import deepspeed  # noqa: E402
import pipe_models as models  # noqa: E402
import surface  # noqa: E402
from deepspeed.config import DeepSpeedConfig  # noqa: E402
from deepspeed.utils.timer import ThroughputTimer  # noqa: E402
from engine_models import config, loss_on, make_net  # noqa: E402
from harness import run_ranks  # noqa: E402
from runs import take_step  # noqa: E402
from surface_tables import ABSENT_MEMBERS, OWN_PARAMETERS  # noqa: E402

MEMBERS = json.loads(pathlib.Path(os.path.dirname(HERE), "python", "data", "engine_members.json").read_text())


def engine_at(stage, **more):
    made = config(1, zero_optimization={"stage": stage}, **more)
    engine = deepspeed.initialize(model=make_net(), config=made)[0]
    take_step(engine, loss_on(engine, 0))
    return engine


class Answers(torch.nn.Linear):
    """As a model of transformers: the engine hands on what it has not itself."""

    def __init__(self):
        super().__init__(2, 2)
        self.config = {}

    def generate(self):
        return []


def objects():
    """Of each class of the list one that has trained."""
    pipeline = models.engine_of("plain", 1, 1, 2)
    pipeline.train_batch(models.batches("plain", 1, 2, 0))
    stage3 = engine_at(3)
    return {
        "DeepSpeedEngine": engine_at(0, flops_profiler={"enabled": True}),
        "PipelineEngine": pipeline,
        "PipelineModule": pipeline.module,
        "DeepSpeedZeroOptimizer": engine_at(1).optimizer,
        "DeepSpeedZeroOptimizer_Stage3": stage3.optimizer,
        "DeepSpeedZeRoOffload": stage3.optimizer.parameter_offload,
        "BF16_Optimizer": engine_at(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}).optimizer,
        "InferenceEngine": deepspeed.init_inference(Answers(), dtype=torch.float32),
        "DeepSpeedConfig": DeepSpeedConfig({"train_batch_size": 1}),
        "ThroughputTimer": ThroughputTimer(),
    }


def problems_of(name, one):
    """``[(member, what is wrong)]``. Attributes of the wrapped model are none of the engine."""
    cls, found = type(one), []
    for member, kind in MEMBERS[name].items():
        if not kind.startswith("("):
            if not _has(one, member):
                found.append((member, "is missing"))
            continue
        value = getattr(cls, member, None)
        if value is None:
            found.append((member, "is missing"))
            continue
        names = [base.__name__ + ("" if member == "__init__" else f".{member}") for base in cls.__mro__]
        ours = [key for full in names for key in OWN_PARAMETERS.get(full, ())]
        module = sys.modules[cls.__module__]
        real = surface.real_parameters(value, not isinstance(vars(cls).get(member), staticmethod), ours)
        difference = surface.compare_parameters(surface.published_parameters(kind, module), real)
        if difference:
            found.append((member, difference))
    return found


def _has(one, member):
    if isinstance(one, deepspeed.DeepSpeedEngine):  # which hands on attributes of the model
        return hasattr(type(one), member) or member in vars(one) or member in one._modules
    return hasattr(one, member)


def compares(rank, world):
    made = objects()
    assert set(made) == set(MEMBERS)
    return {name: problems_of(name, one) for name, one in made.items()}


@pytest.fixture(scope="module")
def problems():
    (found,) = run_ranks(1, compares, init=True)
    return found


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_members(name, problems):
    absent = {full.split(".")[1] for names in ABSENT_MEMBERS.values() for full in names if full.split(".")[0] == name}
    wrong = [f"{name}.{member} {text}" for member, text in problems[name] if member not in absent]
    assert not wrong, "\n".join(wrong)


def test_every_absent_member_is_still_absent(problems):
    missing = {f"{name}.{member}" for name, found in problems.items() for member, _ in found}
    here = sorted({full for names in ABSENT_MEMBERS.values() for full in names} - missing)
    assert not here, f"these are here now: take them out of ABSENT_MEMBERS in tests/python/surface_tables.py: {here}"
