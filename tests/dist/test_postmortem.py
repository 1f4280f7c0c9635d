"""Post-mortems: a step with one of twelve faults is saved, run again in one process, and gets the right verdict."""

import contextlib
import glob
import os
import re
import sys
import time

import pytest
import torch

import deepspeed
import postmortem_models
from deepspeed.checkpoint.write.file_writer import inject_fault
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
from deepspeed.diagnosis.bundle import Bundle, BundleError
from deepspeed.diagnosis.replay import Replay
from deepspeed.engine.parts.postmortem import VERSION
from harness import run_ranks
from logs import logged
from models import two_layers
from postmortem_models import BROKEN, LATE, TIMEOUT, factory, only, said
from refusals import refused
from runs import engine_of, raised, settings, take_step, with_fp16

GOOD = 10  # steps before the fault
# fault -> verdict, a part of the name of the first bad tensor, module
FAULTS = {
    "nan sample": (DATA, "micro-batch 1", ""),
    "label out of range": (DATA, "micro-batch 1", ""),
    "fp16 overflow": (OVERFLOW, "the output of 'layers.1'", "layers.1"),
    "bit flip in a weight": (WEIGHTS, "'layers.0.weight'", "layers.0"),
    "nan weight": (WEIGHTS, "'layers.0.weight'", "layers.0"),
    "bit flip in a state": (WEIGHTS, "state exp_avg of ", None),
    "operator that returns inf": (OPERATOR, "the output of 'steep'", "steep"),
    "operator that is not repeatable": (HARDWARE, "loss of micro-batch 1", ""),
    "damaged reduction": (EXCHANGE, "reduced gradient", None),
    "bad batch": (DATA, "micro-batch 1", ""),
    "exception": (SCRIPT, "none", ""),
    "hang": (SCRIPT, "", ""),
}


def flip(tensor, bit=30):
    """One bit of the largest element, as a fault of memory does it: torch hears nothing of it."""
    flat = tensor.detach().reshape(-1)
    flat.numpy().view("int32")[int(flat.abs().argmax())] ^= 1 << bit


def own(param):
    return param.ds_tensor if hasattr(param, "ds_tensor") else param.data


def batch(rank, step, micro):
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randn(2, 8, generator=generator), torch.randint(0, 4, (2,), generator=generator)


def break_before(engine, fault):
    weight = own(engine.module.layers[0].weight)
    if fault == "bit flip in a weight":
        flip(weight)
    if fault == "nan weight":
        weight.reshape(-1).numpy()[0] = float("nan")
    if fault == "bit flip in a state":
        slots, names = engine.core.slots(engine.core.slot_names().index("exp_avg")), engine.stepping.names
        pieces = zip(engine.core.pieces(), slots)
        flip(next(slot for (index, _, numel), slot in pieces if numel and names[index].startswith("layers")))


def micro_step(engine, step, micro, fault):
    x, y = batch(engine.global_rank, step, micro)
    more = {}
    if fault == "nan sample":
        x[1, 2] = float("nan")
    if fault == "label out of range":
        y[1] = 99
    if fault == "operator that returns inf":
        more["steep"] = True
    if fault == "fp16 overflow":
        more["gain"] = 1e6
    if fault == "bad batch":
        x *= 1000
    if fault == "hang":
        time.sleep(LATE)
    BROKEN.update(raises=fault == "exception", once=fault == "operator that is not repeatable")
    loss = engine(x, y, **more)
    BROKEN.update(raises=False, once=False)
    return loss


def train(rank, world, stage, fault, folder, on=("nonfinite", "spike", "exception", "hang"), dtype="fp32", **more):
    fp16 = fault == "fp16 overflow"
    if fp16:
        more["fp16"] = {"enabled": True, "loss_scale": 8.0}
    made = settings(
        stage,
        accumulate=2,
        dtype="fp32" if fp16 else dtype,
        postmortem={"on": list(on), "dir": folder},
        comm={"timeout": TIMEOUT} if fault == "hang" else {},
        **more,
    )
    torch.manual_seed(rank)
    faulty = rank == world - 1
    deepspeed.init_distributed(dist_backend="gloo")  # patient, as other tests may load the machine
    with with_fp16() if fp16 else contextlib.nullcontext():
        engine = engine_of(factory(), made)
    try:
        for step in range(GOOD + 2):
            if step == GOOD and faulty:
                break_before(engine, fault)
            for micro in range(2):
                loss = micro_step(engine, step, micro, fault if (step, micro, faulty) == (GOOD, 1, True) else None)
                engine.backward(loss)
                if fault == "damaged reduction" and (step, micro) == (GOOD, 1) and (faulty or stage == 0):
                    engine.core.finish_backward()
                    next(piece for piece in engine.core.grads() if piece is not None and piece.numel())[0] = float(
                        "inf"
                    )
                engine.step()
    except (RuntimeError, IndexError) as error:
        return str(error)
    finally:
        BROKEN.update(raises=False)
    return None


@pytest.fixture(autouse=True)
def same_threads():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def the_bundle(folder):
    return Bundle(only(folder))


CASES = [
    (fault, stage, world)
    for fault in FAULTS
    for stage in range(4)
    for world in (1, 2, 3, 4)
    if not (fault == "hang" and world == 1)
]


@pytest.mark.sample("values", 20)
@pytest.mark.parametrize("fault, stage, world", CASES)
def test_verdicts(fault, stage, world, tmp_path):
    run_ranks(world, train, stage, fault, str(tmp_path), fresh=fault in ("hang", "exception", "label out of range"))
    bundle = the_bundle(tmp_path)
    replay = Replay(bundle, factory) if bundle.refusal is None else None
    verdict = blame(bundle, replay)
    kind, tensor, module = FAULTS[fault]
    assert verdict.verdict == kind and tensor in verdict.tensor, verdict
    assert module is None or verdict.module == module
    if fault == "bad batch":  # nothing is inf or nan, so this compares every figure
        rows = compare(bundle, replay)[1]
        assert len(rows) > 2 * world and {row.gap for row in rows} == {0.0}
    in_all = fault == "damaged reduction" and stage == 0
    assert verdict.rank == world - 1 or in_all, verdict


def caught(rank, world, folder, fault, where):
    """The script catches an error of a micro-batch, evaluates with gradients, and goes on; a later step fails."""
    made = settings(1, accumulate=3, postmortem={"on": ["nonfinite", "spike"], "dir": folder})
    torch.manual_seed(rank)
    engine = engine_of(factory(), made)
    for step in range(GOOD + 1):
        for micro in range(3):
            if step == GOOD and micro == 1:
                if where == "forward":
                    raised(micro_step, engine, step, micro, "exception")
                elif where == "backward":
                    loss = micro_step(engine, step, 7, None)
                    handle = engine.module.layers[1].bias.register_hook(lambda grad: 1 / 0)
                    raised(engine.backward, loss)
                    handle.remove()
                micro_step(engine, step, 8, None)
            engine.backward(micro_step(engine, step, micro, fault if (step, micro) == (GOOD, 2) else None))
            engine.step()


@pytest.mark.parametrize("where", ["forward", "backward", "evaluation"])
@pytest.mark.parametrize("fault", ["bad batch", "operator that returns inf"])
def test_verdicts_after_an_error_that_the_script_has_caught(fault, where, tmp_path):
    run_ranks(1, caught, str(tmp_path), fault, where)
    bundle = the_bundle(tmp_path)
    assert len(bundle.first["micro_batches"]) == 3
    verdict, (kind, tensor, _) = blame(bundle, Replay(bundle, factory)), FAULTS[fault]
    assert verdict.verdict == kind and tensor.replace("1", "2") in verdict.tensor.replace("1", "2"), verdict


# ---- what is saved, and when -----------------------------------------------------------------------------------------
def folders(folder):
    return sorted(glob.glob(os.path.join(folder, "*-step*")))


def one_engine(rank, folder, stage=1, dtype="fp32", client=None, zero=(), **section):
    section = {"on": ["nonfinite", "spike", "exception", "hang"], "dir": folder, **section}
    return engine_of(factory(), settings(stage, dtype=dtype, zero=zero, postmortem=section), client)


def step_of(engine, step, bad=False):
    x, y = batch(engine.global_rank, step, 0)
    if bad:
        x[0, 0] = float("nan")
    take_step(engine, engine(x, y))


def dynamic_scale(rank, world, folder):
    with with_fp16():
        made = settings(2, fp16={"enabled": True}, postmortem={"on": ["nonfinite"], "dir": folder})
        engine = engine_of(factory(), made)
        for step in range(3):
            x, y = batch(rank, step, 0)
            take_step(engine, engine(x, y, gain=1e6 if step == 1 else 1.0))
    return engine.skipped_steps


def test_an_overflow_that_lowers_a_dynamic_scale_is_no_failure(folder):
    assert run_ranks(2, dynamic_scale, folder)[0] >= 1 and folders(folder) == []


def many(rank, world, folder, keep):
    engine = one_engine(rank, folder, dtype="bf16", keep=keep)  # a step with nan is skipped
    for step in range(9):
        step_of(engine, step, bad=step in (1, 2, 4, 7))


def test_the_newest_bundles_stay_and_the_first_of_failing_steps_is_saved(folder):
    run_ranks(2, many, folder, 2)
    assert [path[-8:] for path in folders(folder)] == ["00000004", "00000007"]
    assert [sorted(os.listdir(path)) for path in folders(folder)] == [["rank00000.pt", "rank00001.pt"]] * 2


def references(rank, world, folder):
    engine = one_engine(rank, folder)
    x, y = batch(0, 0, 0)
    loss = engine(x, y)
    kept = engine._postmortem._micro[0]["inputs"]
    assert kept[0] is x and kept[1] is y
    engine.backward(loss)
    assert engine._postmortem._micro[0]["loss"].data_ptr() == loss.data_ptr()
    engine.step()
    assert engine._postmortem._micro == [] and engine._postmortem._before[0]["inputs"][0] is x


def test_a_step_keeps_references(folder):
    run_ranks(1, references, folder)


def limited(rank, world, folder, most):
    engine = one_engine(rank, folder, max_bytes=most)
    with logged() as lines:
        step_of(engine, 0, bad=True)
    return "\n".join(lines)


@pytest.mark.parametrize("most, words", [(10300, ", without weights: it would"), (50, "is not saved: its micro")])
def test_a_bundle_that_is_too_large(folder, most, words):
    assert all(words in said for said in run_ranks(2, limited, folder, most))
    if most == 50:
        return
    bundle = the_bundle(folder)
    assert blame(bundle).verdict == DATA
    refused(BundleError, "not replayed: rank 0 has no weights: .*max_bytes", Replay, bundle, factory)


def full_disk(rank, world, folder, kind):
    engine = one_engine(rank, folder)
    step_of(engine, 0)
    with logged() as lines:
        inject_fault("write:1+:enospc")
        if kind == "exception":
            BROKEN["raises"] = True
            found = raised(step_of, engine, 1)
            BROKEN["raises"] = False
        else:
            found = raised(step_of, engine, 1, True)
        inject_fault("")
    return found, [line for line in lines if "is not saved" in line]


@pytest.mark.parametrize("kind", ["exception", "nonfinite"])
def test_a_full_disk_is_one_warning(folder, kind):
    ((found, warnings),) = run_ranks(1, full_disk, folder, kind)
    assert found == (("RuntimeError", "the disk of this script is full") if kind == "exception" else None)
    assert len(warnings) == 1 and "No space left" in warnings[0]


def uncaught(rank, world, folder):
    engine = one_engine(rank, folder)
    step_of(engine, 0)
    engine(*batch(0, 1, 0))
    try:
        raise KeyError("the script's own")
    except KeyError:
        sys.excepthook(*sys.exc_info())


def test_an_error_that_ends_the_script_is_saved(folder):
    run_ranks(1, uncaught, folder)
    verdict = blame(the_bundle(folder), Replay(the_bundle(folder), factory))
    assert verdict.verdict == SCRIPT and "KeyError" in verdict.because and "test_postmortem.py" in verdict.because


def own_loss(rank, world, folder):
    engine = engine_of(two_layers(6, 5, 4), settings(0, postmortem={"on": ["nonfinite"], "dir": folder}))
    x, y = torch.randn(2, 6), torch.tensor([0, 3])
    loss = torch.nn.functional.cross_entropy(engine(x), y) / (0.0 if rank == world - 1 else 1.0)
    engine.keep_for_postmortem(y, rank)
    take_step(engine, loss)


def test_a_loss_that_the_script_computes(folder):
    run_ranks(2, own_loss, folder)
    bundle = the_bundle(folder)
    refused(BundleError, "does not return its loss.*--step", Replay(bundle, two_of_four).run, 0)
    verdict = blame(bundle, Replay(bundle, two_of_four, script_loss))
    assert verdict[:4] == (OPERATOR, "the loss is inf", "", 1)


def two_of_four():
    return two_layers(6, 5, 4)


def script_loss(model, x, y, rank):
    return torch.nn.functional.cross_entropy(model(x), y) / (0.0 if rank == 1 else 1.0)


def one_fails(rank, world, folder):
    """Rank 1 raises and lives on; rank 0 waits for it in vain."""
    deepspeed.init_distributed(dist_backend="gloo")
    on = {"on": ["exception", "hang"], "dir": folder}
    engine = engine_of(factory(), settings(1, postmortem=on, comm={"timeout": TIMEOUT}))
    step_of(engine, 0)
    BROKEN["raises"] = rank == 1
    found = raised(step_of, engine, 1)
    BROKEN["raises"] = False
    time.sleep(LATE * rank)
    return found[0]


def test_an_exception_goes_before_the_hang_that_it_causes(folder):
    run_ranks(2, one_fails, folder, fresh=True)
    bundle = the_bundle(folder)
    assert [content["kind"] for content in bundle.ranks.values()] == ["hang", "exception"]
    verdict = blame(bundle)
    assert verdict[:4] == (SCRIPT, "none", "", 1) and "the disk of this script is full" in verdict.because
    assert "the step was not run again: rank 0 has no weights" in verdict.because


# ---- bad input -------------------------------------------------------------------------------------------------------
def unwritable(rank, world, folder):
    open(os.path.join(folder, "file"), "a").close()
    return raised(one_engine, rank, folder if rank == 0 else os.path.join(folder, "file", "below"))


def test_a_folder_that_one_rank_cannot_write_is_an_error_on_all(folder):
    kind, text = run_ranks(2, unwritable, folder)[0]
    assert kind == "ValueError" and "rank 1: postmortem.dir: " in text and "Not a directory" in text
    assert run_ranks(2, unwritable, folder)[1] == (kind, text)


def strategies(rank, world, folder):
    flow = {"topk_ratio": 0.5, "select_interval": 2, "update_interval": 2}
    host = {"offload_optimizer": {"device": "cpu"}, "zenflow": flow}
    return raised(one_engine, rank, folder, 2, zero=host)


def test_steps_without_a_moment_to_save_are_refused(folder):
    assert "postmortem.on: zenflow and super_offload" in run_ranks(1, strategies, folder)[0][1]


@pytest.fixture
def failed(folder):
    run_ranks(2, train, 1, "bad batch", folder)
    return folders(folder)[0]


def changed(path, rank, **values):
    file = os.path.join(path, f"rank{rank:05d}.pt")
    torch.save({**torch.load(file), **values}, file)


def test_the_program(failed, capsys):
    model = f"{postmortem_models.__file__}:factory"
    code, text = said(capsys, "show", failed)
    assert code == 0 and "kind: spike" in text and "replay: possible" in text and "rank 1:" in text
    code, text = said(capsys, "replay", failed, "--model", model)
    assert code == 0 and "loss: bitwise those of the run\nreduced gradient: bitwise" in text
    code, text = said(capsys, "blame", failed, "--model", model)
    assert code == 0 and text.startswith("verdict: data\ntensor: micro-batch 1\nmodule: \nrank: 1\nbecause: ")
    code, text = said(capsys, "blame", failed, "--model", model, "--step", f"{postmortem_models.__file__}:with_labels")
    assert code == 0 and text.startswith("verdict: data")
    assert said(capsys, "replay", failed)[1].startswith("ds_postmortem: replay needs --model")
    assert "there is no such file or function" in said(capsys, "replay", failed, "--model", model + "s")[1]
    assert (
        "--model makes another model: parameter"
        in said(capsys, "replay", failed, "--model", __file__ + ":two_of_four")[1]
    )
    assert "pass --model" in said(capsys, "blame", failed)[1]
    assert "has no file rankNNNNN.pt" in said(capsys, "show", os.path.dirname(failed))[1]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": 1}, "it has version 1, and this program reads version 2"),
        ({"axes": {"pp": 2, "tp": 1, "sp": 1, "ep": 1}}, "the script ran the stages of its pipeline itself"),
        ({"changed_by": ["random_ltd"]}, "random_ltd was on, which changes what a step computes"),
        (None, r"the files of ranks \[1\] of 2 are not there"),
    ],
)
def test_bundles_that_are_shown_and_not_replayed(failed, capsys, change, words):
    if change is None:
        os.remove(os.path.join(failed, "rank00001.pt"))
    else:
        changed(failed, 0, **change)
    code, text = said(capsys, "show", failed)
    assert code == 0 and re.search("replay: " + words, text)
    code, text = said(capsys, "replay", failed, "--model", f"{postmortem_models.__file__}:factory")
    assert code == 1 and re.search("is shown and not replayed: " + words, text)


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("content", ["code", "torn", "other"])
def test_nothing_in_a_file_is_trusted(failed, capsys, content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = os.path.join(failed, "rank00000.pt")
    if content == "code":
        changed(failed, 0, error=Harm())
    elif content == "torn":
        os.truncate(path, os.path.getsize(path) // 2)
    else:
        torch.save({"version": VERSION}, path)
    code, text = said(capsys, "show", failed)
    assert code == 1 and path in text and not os.path.exists("harm")
