"""Post-mortems of models that are cut over ranks: as many processes as the run had make the step again, and compare
losses and gradients."""

import pytest
import torch

import deepspeed
import moe_models
import postmortem_models
import sequence_models
from deepspeed.diagnosis.blame import (
    DATA,
    EXCHANGE,
    HARDWARE,
    OPERATOR,
    OVERFLOW,
    SCRIPT,
    WEIGHTS,
    blame,
    compare,
)
from deepspeed.diagnosis.bundle import Bundle
from deepspeed.diagnosis.ranks import RanksReplay
from harness import run_ranks
from postmortem_models import BROKEN, LATE, TIMEOUT, only, said
from runs import engine_of, settings, take_step
from sampling import every_case

GOOD = 9  # steps before the fault


def target(name):
    return f"{postmortem_models.__file__}:{name}"


def damage_weight(weight, fault):
    """Its first element becomes nan, or one bit of its exponent changes."""
    flat = getattr(weight, "ds_tensor", weight.data).reshape(-1).numpy()
    flat[:1].view("int32")[:] = 0x7FC00000 if fault == "nan weight" else flat[:1].view("int32") ^ (1 << 30)


def damage(engine):
    """An element of the reduced gradients becomes inf, as a fault of a reduction does it."""
    step = engine.stepping.optimizer.step

    def damaged():
        engine.core.finish_backward()
        next(piece for piece in engine.core.grads() if piece is not None and piece.numel())[0] = float("inf")
        step()

    engine.stepping.optimizer.step = damaged


# ---- pipelines -------------------------------------------------------------------------------------------------------
# fault -> verdict, a part of the name of the first bad tensor, module; where the model is broken: in layer 3
FAULTS = {
    "nan sample": (DATA, "input of micro-batch 1", ""),
    "nan weight": (WEIGHTS, " of '3.layer.weight'", "3.layer"),
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
            if fault == "fp16 overflow":
                x[1, 2] = 5000.0
            if fault == "bad batch":
                x *= 100.0
            if fault == "label out of range":
                y[1] = 99
        BROKEN.update(raises=fault == "exception", once=fault == "operator that is not repeatable" and micro == 1)
        BROKEN.update(sleeps=LATE if fault == "hang" else 0.0)
        yield x, y


WEIGHT = {
    **dict.fromkeys(("piped", "piped_parts", "piped_v"), "3.layer.weight"),
    "piped_tied": "2.weight",
}  # is damaged


def train(rank, world, model, stage, schedule, fault, folder, more=None):
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(rank)
    made = settings(
        stage,
        accumulate=2,
        postmortem={"on": ["nonfinite", "spike", "exception", "hang"], "dir": folder},
        comm={"timeout": TIMEOUT} if fault == "hang" else {},
        pipeline={"schedule": schedule},
        fp16={"enabled": True, "loss_scale": 8.0} if fault == "fp16 overflow" else None,
        **(more or {}),
    )
    engine = engine_of(getattr(postmortem_models, model)(), made)
    copy = engine.grid.get_data_parallel_rank()
    faulty = copy == engine.dp_world_size - 1
    try:
        for step in range(GOOD + 1):
            here = fault if (step, faulty) == (GOOD, True) else None
            weight = dict(engine.module.named_parameters()).get(WEIGHT.get(model))
            if here in ("nan weight", "bit flip") and weight is not None:
                damage_weight(weight, here)
            at_fault = faulty or stage == 0  # where each rank has all of them, copies are damaged alike
            if fault == "damaged reduction" and step == GOOD and at_fault and engine.is_last_stage():
                damage(engine)
            engine.train_batch(pairs(copy, step, here))
    except (RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        BROKEN.update(raises=False, once=False, sleeps=0.0)
    return None


SETUPS = [("piped", 0, "1f1b"), ("piped", 1, "zb-h1"), ("piped_parts", 1, "interleaved")]


@pytest.mark.sample("values")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("model, stage, schedule", SETUPS)
@pytest.mark.parametrize("world", [2, 4] if every_case() else [2])  # a replay starts as many processes
def test_verdicts_of_pipelines(fault, model, stage, schedule, world, folder):
    dirty = fault in ("hang", "exception", "label out of range")
    told = run_ranks(world, train, model, stage, schedule, fault, folder, fresh=dirty)
    bundle = Bundle(only(folder))
    replay = None if bundle.refusal else RanksReplay(bundle, target(model), None)
    verdict = blame(bundle, replay)
    kind, tensor, module = FAULTS[fault]
    assert verdict.verdict == kind and tensor in verdict.tensor, (verdict, told)
    assert module is None or verdict.module == module, verdict
    rank = {"nan sample": world // 2 - 1, "damaged reduction": world // 2 if stage == 0 else world - 1}
    assert verdict.rank == rank.get(fault, world - 1), verdict
    if fault == "bad batch":  # nothing is inf or nan, so this compares every figure
        rows = compare(bundle, replay)[1]
        assert len(rows) > 4 * world and {row.gap for row in rows} == {0.0}, rows


def test_an_overflow_in_a_pipeline(folder):
    run_ranks(2, train, "piped_fp16", 1, "1f1b", "fp16 overflow", folder, fresh=True)
    bundle = Bundle(only(folder))
    verdict = blame(bundle, RanksReplay(bundle, target("piped_fp16"), None))
    assert verdict[:4] == (OVERFLOW, "the output of '3' is inf", "3", 1), verdict


def test_the_program(folder, capsys):
    run_ranks(2, train, "piped", 0, "gpipe", "bad batch", folder)
    code, text = said(capsys, "show", only(folder))
    assert code == 0 and "replay: possible" in text and "schedule: gpipe" in text
    code, text = said(capsys, "replay", only(folder), "--model", target("piped"))
    assert code == 0 and "loss: bitwise those of the run\nreduced gradient: bitwise those of the run" in text
    code, text = said(capsys, "blame", only(folder), "--model", target("piped"), "--step", target("with_labels"))
    assert code == 1 and "this is a PipelineModule, which has a loss_fn: leave --step out" in text
    code, text = said(capsys, "replay", only(folder), "--model", target("factory"))
    assert code == 1 and "the ranks of the replay ended with the codes" in text


# ---- other cuts ------------------------------------------------------------------------------------------------------
KINDS = {"sequence": 2, "experts": 2, "tensor": 4, "auto_ep": 2}  # and their ranks
CUT_FAULTS = {"inf": OPERATOR, "once": HARDWARE, "nan weight": WEIGHTS, "spike": DATA}


def train_cut(rank, world, kind, stage, fault, folder, more=None):
    deepspeed.init_distributed(dist_backend="gloo")
    more = {**({"sequence_parallel_size": 2} if kind == "sequence" else {}), **(more or {})}
    more["postmortem"] = {"on": ["nonfinite", "spike"], "dir": folder}
    made = getattr(postmortem_models, f"{kind}_model")()
    model, mpu = made if isinstance(made, tuple) else (made, None)
    decays = [[one for one in model.parameters() if (one.dim() > 1) == wanted] for wanted in (True, False)]
    groups = [{"params": group} for group in decays if group]  # as scripts make them
    groups = None if kind in ("experts", "auto_ep") else groups
    engine = engine_of(model, settings(stage, **more), mpu=mpu, model_parameters=groups)
    last = GOOD if fault == "spike" else 2
    for step in range(last + 1):
        broken = fault if step == last and rank == 1 else None
        if broken == "nan weight":  # of the last layer, since gates refuse nan
            weights = [one for one in engine.module.parameters() if getattr(one, "ds_numel", one.numel()) > 1]
            damage_weight(weights[-1], broken)
        BROKEN["once"] = broken == "once"
        given = [torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank // 2))]
        if kind in ("experts", "auto_ep"):
            given = [moe_models.batch(step, rank)]
        if kind == "sequence":
            given = [one.chunk(2, 1)[rank] for one in sequence_models.batch_of(step, 0)]
        gain = 100.0 if fault == "spike" and step == last else 1.0
        take_step(engine, engine(*given, steep=broken == "inf", gain=gain))
        BROKEN["once"] = False


@pytest.mark.sample("values")
@pytest.mark.parametrize("kind", ["sequence", "experts", "tensor"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("fault", CUT_FAULTS)
def test_a_model_that_is_cut_runs_on_as_many_ranks(folder, capsys, kind, stage, fault):
    run_ranks(KINDS[kind], train_cut, kind, stage, fault, folder)
    given = (only(folder), "--model", target(f"{kind}_model"))
    code, text = said(capsys, "blame", *given)
    assert code == 0 and text.startswith(f"verdict: {CUT_FAULTS[fault]}\n"), text
    assert "rank: 1\n" in text or fault == "spike", text
    assert ("module: steep\n" in text) == (fault == "inf")
    if fault == "spike":  # nothing is inf or nan, so this compares every figure
        code, text = said(capsys, "replay", *given)
        assert code == 0 and "loss: bitwise those of the run\nreduced gradient: bitwise" in text, text


# ---- with other features ---------------------------------------------------------------------------------------------
ON_HOST = {"offload_optimizer": {"device": "cpu"}}
MUON = {"type": "Muon", "params": {"muon_lr": 0.01, "adam_lr": 0.001}}
PIPED = {  # schedule -> model, stage, and more of the configuration
    "zb-v": ("piped_v", 1, {"zero": ON_HOST}),
    "dualpipe-v": ("piped_v", 0, {}),
    "auto": ("piped_tied", 1, {"optimizer": MUON}),
}
PIPED_FAULTS = {  # verdict, a part of the name of the first bad tensor
    "nan sample": (DATA, "input of micro-batch 1"),
    "bit flip": (WEIGHTS, " of '{}'"),
    "bad batch": (DATA, "micro-batch 1"),
}


@pytest.mark.sample("values")
@pytest.mark.parametrize("schedule", PIPED)
@pytest.mark.parametrize("fault", PIPED_FAULTS)
def test_pipelines_with_other_features(folder, schedule, fault):
    model, stage, more = PIPED[schedule]
    told = run_ranks(2, train, model, stage, schedule, fault, folder, more)
    bundle = Bundle(only(folder))
    replay = RanksReplay(bundle, target(model), None) if fault == "bad batch" else None  # others show in the files
    verdict, (kind, tensor) = blame(bundle, replay), PIPED_FAULTS[fault]
    assert verdict.verdict == kind and tensor.format(WEIGHT[model]) in verdict.tensor, (verdict, told)
    if fault == "bit flip":  # the first stage has the last part of a V
        assert verdict.module == WEIGHT[model].rpartition(".")[0] and verdict.rank == (model == "piped_tied"), verdict
    if replay is not None:
        rows = compare(bundle, replay)[1]
        assert len(rows) > 8 and {row.gap for row in rows} == {0.0}, rows


IN_ALL = pytest.mark.every("starts as many processes as the run had, once for each question")
WITH_MORE = {  # stage, and more of the configuration
    "sequence": (3, {"zero": {**ON_HOST, "offload_param": {"device": "cpu"}}}),
    "tensor": (2, {"optimizer": MUON}),
    "experts": (1, {"zero": ON_HOST}),
    "auto_ep": (2, {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
}


@pytest.mark.parametrize(
    "fault", ["inf", pytest.param("spike", marks=IN_ALL), pytest.param("nan weight", marks=IN_ALL)]
)
@pytest.mark.parametrize(
    "kind", ["auto_ep", "sequence", *(pytest.param(one, marks=IN_ALL) for one in ("tensor", "experts"))]
)
def test_cut_models_with_other_features(folder, capsys, kind, fault):
    stage, more = WITH_MORE[kind]
    run_ranks(KINDS[kind], train_cut, kind, stage, fault, folder, more)
    given = (only(folder), "--model", target(f"{kind}_model"))
    if fault == "spike":  # nothing is inf or nan, so this compares every figure
        code, text = said(capsys, "replay", *given)
        assert code == 0 and "loss: bitwise those of the run\nreduced gradient: bitwise" in text, text
        return
    code, text = said(capsys, "blame", *given)
    assert code == 0 and text.startswith(f"verdict: {CUT_FAULTS[fault]}\n") and "rank: 1\n" in text, text
    assert ("module: steep\n" in text) == (fault == "inf")
