"""Post-mortems of models that are cut over ranks: as many processes as the run had make the step again, and compare
losses and gradients."""

import glob
import os
import time

import pytest
import torch

import deepspeed
import moe_models
import postmortem_models
import sequence_models
from deepspeed.diagnosis.blame import DATA, EXCHANGE, HARDWARE, OPERATOR, SCRIPT, WEIGHTS, blame, compare
from deepspeed.diagnosis.bundle import Bundle
from deepspeed.diagnosis.cli import main
from deepspeed.diagnosis.ranks import RanksReplay
from harness import run_ranks
from postmortem_models import BROKEN
from runs import engine_of, settings, take_step

GOOD = 9  # steps before the fault


def said(capsys, *arguments):
    code = main(list(arguments))
    out, error = capsys.readouterr()
    return code, out + error


def only(folder):
    (found,) = glob.glob(os.path.join(folder, "*-step*"))
    return found


def target(name):
    return f"{postmortem_models.__file__}:{name}"


def spoil(engine, bad):
    """Of the reduced gradients an element, as a fault of a reduction does it."""
    next(piece for piece in engine.core.grads() if piece is not None and piece.numel())[0] = bad


# ---- pipelines -------------------------------------------------------------------------------------------------------
# fault -> verdict, a part of the name of the first bad tensor, module; where the model is broken: in layer 3
FAULTS = {
    "nan sample": (DATA, "input of micro-batch 1", ""),
    "nan weight": (WEIGHTS, "weight of '3.layer.weight'", "3.layer"),
    "operator that returns inf": (OPERATOR, "the output of '3.steep'", "3.steep"),
    "operator that is not repeatable": (HARDWARE, "loss of micro-batch 1", ""),
    "damaged reduction": (EXCHANGE, "reduced gradient of '", None),
    "bad batch": (DATA, "micro-batch 1", ""),
    "label out of range": (DATA, "micro-batch 1", "3"),
    "exception": (SCRIPT, "none", "3"),
    "hang": (SCRIPT, "", "3"),
}


def pair(copy, step, micro):
    generator = torch.Generator().manual_seed(1000 * copy + 10 * step + micro)
    return torch.randn(2, 8, generator=generator), torch.randint(0, 8, (2,), generator=generator)


def pairs(copy, step, fault):
    for micro in range(2):
        x, y = pair(copy, step, micro)
        torch.rand(3)  # data that are drawn change the random numbers of this rank
        if micro == 1:
            if fault == "nan sample":
                x[1, 2] = float("nan")
            if fault == "operator that returns inf":
                x[1, 2] = 5000.0
            if fault == "bad batch":
                x *= 100.0
            if fault == "label out of range":
                y[1] = 99
        BROKEN.update(raises=fault == "exception", once=fault == "operator that is not repeatable" and micro == 1)
        BROKEN.update(sleeps=4.0 if fault == "hang" else 0.0)
        yield x, y


def train(rank, world, model, stage, schedule, fault, folder):
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(rank)
    made = settings(
        stage,
        accumulate=2,
        postmortem={"on": ["nonfinite", "spike", "exception", "hang"], "dir": folder},
        comm={"timeout": 2} if fault == "hang" else {},
        pipeline={"schedule": schedule},
    )
    engine = engine_of(getattr(postmortem_models, model)(), made)
    copy = engine.grid.get_data_parallel_rank()
    faulty = copy == engine.dp_world_size - 1
    try:
        for step in range(GOOD + 1):
            here = fault if (step, faulty) == (GOOD, True) else None
            if here == "nan weight" and engine.is_last_stage():
                engine.module.get_submodule("3.layer").weight.data[0] = float("nan")
            if here == "damaged reduction" and engine.is_last_stage():
                reduce = engine.core.finish_backward
                before = engine.stepping.optimizer.step

                def damaged():
                    reduce()
                    spoil(engine, float("inf"))
                    before()

                engine.stepping.optimizer.step = damaged
            engine.train_batch(pairs(copy, step, here))
    except (RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        BROKEN.update(raises=False, once=False, sleeps=0.0)
    return None


@pytest.mark.sample("values")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage, schedule", [(0, "1f1b"), (1, "zb-h1")])
@pytest.mark.parametrize("world", [2, 4])
def test_verdicts_of_pipelines(fault, stage, schedule, world, folder):
    results = run_ranks(world, train, "piped", stage, schedule, fault, folder, fresh=fault in ("hang", "exception", "label out of range"))
    bundle = Bundle(only(folder))
    replay = None if bundle.refusal else RanksReplay(bundle, target("piped"), None)
    verdict = blame(bundle, replay)
    kind, tensor, module = FAULTS[fault]
    assert verdict.verdict == kind and tensor in verdict.tensor, (verdict, results)
    assert module is None or verdict.module == module, verdict
    first = fault in ("nan sample",)
    assert verdict.rank == (world // 2 - 1 if first else world - 1), verdict
    if fault in ("bad batch", "operator that returns inf"):
        rows = compare(bundle, replay)[1]
        assert len(rows) > 8 * world // 2 and {row.gap for row in rows} == {0.0}


# ---- other cuts ------------------------------------------------------------------------------------------------------
# ---- models that are cut over ranks ----------------------------------------------------------------------------------
def cut_engine(rank, kind, folder, stage):
    more = {"sequence_parallel_size": 2} if kind == "sequence" else {}
    deepspeed.init_distributed(dist_backend="gloo")
    return engine_of(CUT[kind](), settings(stage, postmortem={"on": ["nonfinite"], "dir": folder}, **more))


def train_cut(rank, world, kind, stage, fault, folder):
    engine = cut_engine(rank, kind, folder, stage)
    for step in range(3):
        broken = fault if step == 2 and rank == 1 else None
        if broken == "nan weight":  # of the last layer, since gates refuse nan
            own(list(engine.module.parameters())[-1]).reshape(-1).numpy()[0] = float("nan")
        BROKEN["once"] = broken == "once"
        take_step(engine, cut_loss(engine, kind, rank, step, broken))
        BROKEN["once"] = False


def cut_loss(engine, kind, rank, step, broken):
    given = [moe_models.batch(step, rank)]
    if kind == "sequence":
        given = [one.chunk(2, 1)[rank] for one in sequence_models.batch_of(step, 0)]
    return engine(*given, steep=broken == "inf")


CUT = {"sequence": postmortem_models.sequence_model, "experts": postmortem_models.experts_model}
CUT_FAULTS = {"inf": OPERATOR, "once": HARDWARE, "nan weight": WEIGHTS}


@pytest.mark.sample("values")
@pytest.mark.parametrize("kind", ["experts", "sequence"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("fault", sorted(CUT_FAULTS))
def test_a_model_that_is_cut_runs_on_as_many_ranks(folder, capsys, kind, stage, fault):
    run_ranks(2, train_cut, kind, stage, fault, folder)
    (path,) = folders(folder)
    code, text = said(capsys, "blame", path, "--model", f"{postmortem_models.__file__}:{kind}_model")
    assert code == 0 and text.startswith(f"verdict: {CUT_FAULTS[fault]}\n") and "rank: 1\n" in text, text
    assert ("module: steep\n" in text) == (fault == "inf")
    if fault == "inf":
        code, text = said(capsys, "replay", path, "--model", f"{postmortem_models.__file__}:{kind}_model")
        assert code == 0 and "loss: bitwise" in text and "reduced gradient: none was saved" in text
