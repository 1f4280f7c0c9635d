"""Optimizers whose ranks exchange signs, in pipelines, in plans and in scripts that run backward themselves."""

import json
import os
import pathlib
import signal
import time

import pytest
import torch

import deepspeed
import pipe_models as models
from harness import RankError, on_ranks, run_ranks
from models import seeded
from onebit_models import KINDS, section, start, train
from plan_calls import calls_of, calls_while, planned_calls
from refusals import refused
from runs import engine_of, identical, settings, together, weights

KIND = pytest.mark.parametrize("kind", sorted(KINDS))


@pytest.mark.parametrize("kind, layers", [("OneBitAdam", "plain"), ("OneBitAdam", "tied"), ("OneBitLamb", "plain")])
@on_ranks(4, init=True)
def test_pipelines(rank, world, kind, layers):
    """Two stages with two copies each: the copies, and tied weights of both stages, stay equal."""
    optimizer = section(kind, freeze_step=2, weight_decay=0.0)
    engine = models.engine_of(layers, 2, world, 2, gradient_clipping=0.5, optimizer=optimizer)
    copy = engine.grid.get_data_parallel_rank()
    for number in range(5):
        engine.train_batch(data_iter=iter(models.batches(layers, 1, 2, copy + 10 * number)))
    assert engine.enable_backward_allreduce is False
    found = together((engine.grid.get_pipe_parallel_rank(), models.parameters_of(engine)))
    for stage, state in found:
        same = [other for number, other in found if number == stage]
        assert all(identical(state, other) for other in same), "copies of a stage differ"
    if layers == "tied":
        tied = [state[name] for _, state in found for name in ("0.weight", "7.weight") if name in state]
        assert len(tied) == 4 and all(torch.equal(one, tied[0]) for one in tied)


@on_ranks(2, init=True)
def test_mpi_with_a_pipeline_is_refused(rank, world):
    optimizer = section("OneBitAdam", comm_backend_name="mpi")
    refused(ValueError, "does not work with a pipeline", models.engine_of, "plain", 2, world, 2, optimizer=optimizer)


def mean_square(output):
    return output.float().square().mean()


@on_ranks(4, init=True)
def test_one_scale_for_all_parameters_and_tied_layers_are_refused(rank, world):
    refused(
        ValueError, "tied layers of a pipeline", models.engine_of, "tied", 2, world, 2, optimizer=section("OneBitLamb")
    )


@KIND
@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2, init=True)
def test_a_plan_has_the_calls_of_a_step(rank, world, kind, frozen):
    """Before the freeze and after it, where 0/1 Adam exchanges in each step."""
    steps = 0 if frozen else 50
    params = {"var_freeze_step": steps, "local_step_clipper": 1} if kind == "ZeroOneAdam" else {"freeze_step": steps}
    given = settings(0, rows=4, optimizer=section(kind, **params))
    net, x = seeded(torch.nn.Linear, 64, 64), torch.ones(4, 64)
    plan = deepspeed.plan(net, given, world, sample=x, ranks=[rank], loss=mean_square)
    engine = engine_of(seeded(torch.nn.Linear, 64, 64), given)

    def step():
        engine.backward(mean_square(engine(x)))
        engine.step()

    ran, planned = calls_of(calls_while(step)), planned_calls(plan)
    count, sent = planned["all_reduce"]
    planned["all_reduce"] = (count - 1, sent - 16)  # of devices whose kernels may fail, unlike those of the CPU
    assert planned == ran
    assert ("all_to_all" in ran) is frozen, ran


@KIND
@on_ranks(2)
def test_a_backward_of_the_script(rank, world, kind):
    """``loss.backward()`` and ``engine.allreduce_gradients()`` give the bits of ``engine.backward``."""

    def trained(by_script):
        engine = start(kind)
        for step in range(6):
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = (engine(x) - x[:, :4]).square().mean()
            loss.backward() if by_script else engine.backward(loss)
            if by_script:
                engine.allreduce_gradients()
            engine.step()
        return weights(engine)

    assert identical(trained(True), trained(False))


@on_ranks(2)
def test_a_step_whose_state_was_loaded_after_its_backward_is_refused(rank, world):
    engine = start("OneBitAdam")
    train(engine, rank, 2)
    x = torch.ones(4, 12)
    engine.backward(engine(x).square().mean())
    engine.core.steps().fill_(7)
    refused(RuntimeError, "after the backward", engine.step)


def until_killed(rank, world, phase, folder):
    engine = start("OneBitAdam")
    train(engine, rank, 5 if phase == "frozen" else 2)
    assert engine.basic_optimizer.adam_freeze_key is (phase == "frozen")
    began = time.monotonic()
    x = torch.ones(4, 12)
    engine.backward(engine(x).square().mean())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:  # of Adam the backward was the last call of the step that waits for others
            engine.step()
            engine.backward(engine(x).square().mean())
    except RuntimeError as error:
        told = {"text": str(error), "seconds": time.monotonic() - began}
        pathlib.Path(folder, str(rank)).write_text(json.dumps(told), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["warm-up", "frozen"])
def test_a_killed_rank_is_named(phase, tmp_path):
    refused(RankError, "SIGKILL", run_ranks, 3, until_killed, phase, str(tmp_path), fresh=True)
    for rank in (0, 2):
        told = json.loads(pathlib.Path(tmp_path, str(rank)).read_text(encoding="utf-8"))
        assert "rank 1" in told["text"] and told["seconds"] < 5, told
