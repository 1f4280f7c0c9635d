"""In which dtype gradients are kept and sent, and what a user may do with them between backward and step."""

import io
from contextlib import redirect_stdout

import pytest
import torch

import deepspeed
from deepspeed.config import cli
from deepspeed.utils import safe_get_full_grad
from harness import on_ranks
from logs import logged
from models import Parts
from plain import Plain, reduced_mean
from refusals import refused
from runs import engine_of, identical, take_step, together, with_fp16
from zero_models import adamw, data, engine_config, loss_of, make, relative

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = {"fp32": torch.float32, **NARROW}
SCALE = 2.0**7
STAGES = [0, 1, 2, 3]


def start(model, stage, world, accumulate=1, dtype="bf16", **more):
    made = engine_config(stage, world, accumulate, dtype, gradient_clipping=0.0, **more)
    with with_fp16():
        return engine_of(model, made)


def loss_on(model, step, part, dtype):
    x, target = data(step, part)
    (output,) = model(x.to(dtype), step, part)
    return loss_of(output, target)


def backward(engine, step, part, dtype):
    engine.backward(loss_on(engine, step, part, DTYPES[dtype]))


def added_up(parts, share):
    """Gradients of a model in fp64, on all parts of a batch, by name."""
    plain = Plain(make("plain"), adamw)
    for part in range(parts):
        plain.add(loss_on(plain.model, 0, part, torch.float64), share=share)
    return plain.sums()


def shrink(params):
    """Calls of scripts between backward and step: rows without a gradient, and a norm that is bounded."""
    weight = params["first.weight"]
    assert weight.grad is not None
    weight.grad[2:5] = 0
    params["middle.bias"].grad = None
    params["last.shift"].grad = params["last.shift"].grad * 2
    if weight.dtype != torch.float16:  # torch 1.13 has no norm of fp16 on the CPU
        torch.nn.utils.clip_grad_norm_(list(params.values()), 0.05)


# ---- .grad at stage 0, and the rounding of the sum over ranks -------------------------------------------------------
@pytest.mark.sample("values")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_what_is_done_to_grad_counts_as_in_a_plain_process(rank, world, dtype):
    scale = SCALE if dtype == "fp16" else 1.0
    model = make("plain").to(DTYPES[dtype])
    plain = Plain(model, adamw, DTYPES[dtype], scale=scale)
    params, theirs = dict(model.named_parameters()), plain.params
    engine = start(model, 0, world, dtype=dtype)
    for step in range(4):
        backward(engine, step, rank, dtype)
        for part in range(world):
            plain.add(loss_on(plain.model, step, part, DTYPES[dtype]))
        for name, p in params.items():
            theirs[name].grad = reduced_mean(plain.parts[name])
            assert p.grad.dtype == p.dtype, name
            assert torch.equal(p.grad, theirs[name].grad), f"step {step}: {name}, bit by bit"
        shrink(params)
        shrink(theirs)
        engine.step()
        plain.update({name: p.grad.float() / scale for name, p in theirs.items() if p.grad is not None})
        assert all(p.grad is None for p in params.values())
        for name, p in params.items():
            assert relative(deepspeed.utils.safe_get_full_fp32_param(p), plain.masters[name]) < 1e-6, (step, name)
    held = dict(engine.core.held_bytes())
    assert held["grad"] == held["lp"] and not held["local"], "two bytes for each parameter"


# ---- every value that the configuration allows ----------------------------------------------------------------------
def check_kinds(rank, world, cases):
    for case in cases:
        stage, param, kept, sent, accumulate = case
        more = {"data_types": {"grad_accum_dtype": kept}} if kept is not None else {}
        more |= {"communication_data_type": sent} if sent is not None else {}
        more |= {"fp16": {"enabled": True, "loss_scale": SCALE}} if param == "fp16" else {}
        model = make("plain")
        engine = start(model, stage, world, accumulate, param, **more)
        kept = kept or ("fp32" if accumulate > 1 else param)
        wanted = DTYPES[kept]
        assert {grad.dtype for grad in engine.core.grads()} <= {wanted}
        assert engine.get_data_types() == (DTYPES[param], wanted)
        assert engine.communication_data_type == DTYPES[sent] if sent else wanted
        for micro in range(accumulate):
            backward(engine, 0, rank * accumulate + micro, param)
            if micro + 1 < accumulate:
                engine.step()
        theirs = added_up(world * accumulate, 1 / (world * accumulate))
        worst = max(relative(safe_get_full_grad(p), theirs[name]) for name, p in model.named_parameters())
        assert worst < max(ROUNDING[kind] for kind in (param, kept, sent or kept)), case
        held = sum(size for kind, size in engine.core.held_bytes().items() if kind in ("grad", "local"))
        size = DTYPES[kept].itemsize if hasattr(torch.float32, "itemsize") else 4 if kept == "fp32" else 2
        # The parameters are tiny, and every one begins at a multiple of 64 elements.
        assert held / sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()) < 9 * size, case
        engine.step()
        assert engine.was_step_applied()


KINDS = [
    (stage, param, kept, sent, accumulate)
    for param in DTYPES
    for kept in (None, *DTYPES)
    for sent in (None, *DTYPES)
    for accumulate in (1, 2)
    for stage in STAGES
]
ROUNDING = {"fp32": 2e-6, "fp16": 4e-3, "bf16": 3e-2}


@on_ranks(2)
def test_types_to_keep_and_to_send(rank, world):
    """Every eleventh of the matrix: each value of each key at each stage occurs."""
    check_kinds(rank, world, KINDS[::11])


@pytest.mark.every("seconds of cases like those of the sample")
@on_ranks(2)
def test_all_types_to_keep_and_to_send(rank, world):
    check_kinds(rank, world, KINDS)


@on_ranks(1)
def test_gradients_in_fp64_stay_so(rank, world):
    model = torch.nn.Linear(3, 3).double()
    made = engine_config(0, 1, 1, "fp32", data_types={"grad_accum_dtype": "bf16"})
    refused(
        ValueError,
        'grad_accum_dtype "bf16": parameter .weight. is float64, and its gradients',
        deepspeed.initialize,
        model=model,
        config=made,
    )


# ---- accumulation that changes on the way ----------------------------------------------------------------------------
@on_ranks(1)
def test_who_has_no_grad_is_told(rank, world):
    deepspeed.logger.setLevel("INFO")
    with logged() as said:
        for accumulate in (1, 2):
            start(make("plain"), 0, world, accumulate)
    told = [text for text in said if "have no .grad between backward and step" in text]
    assert len(told) == 1 and "gradient_accumulation_steps is 2" in told[0] and "safe_set_full_grad" in told[0]


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_the_type_follows_the_accumulation_steps(rank, world, stage):
    engine = start(make("plain"), stage, world)
    kinds = []
    for accumulate in (1, 3, 1):
        engine.set_train_batch_size(2 * world * accumulate)
        for _ in range(accumulate):
            backward(engine, 0, rank, "bf16")
            kinds.append(next(iter({grad.dtype for grad in engine.core.grads()})))
            if stage == 0:
                assert (engine.module.first.weight.grad is None) == (accumulate > 1)
            engine.step()
    assert kinds == [torch.bfloat16] + [torch.float32] * 3 + [torch.bfloat16] and engine.global_steps == 3


# ---- an optimizer of torch's gets fp32 ----------------------------------------------------------------------------
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_unscaling_does_not_round_to_fp16(rank, world, stage):
    # Gradients that fp16 cannot hold without a loss scale.
    model = Parts(lambda net, x: (net.weight.float() * x).sum(), weight=torch.nn.Parameter(torch.zeros(64)))
    made = engine_config(stage, world, 1, "fp16", gradient_clipping=0.0)
    made["fp16"] = {"enabled": True, "loss_scale": 2.0**14}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with with_fp16():
        engine = engine_of(model, made, optimizer)
    x = torch.full((64,), 3.01e-6)  # no multiple of fp16's smallest step, which is 6e-8
    take_step(engine, engine(x))
    held = [master.grad for group in optimizer.param_groups for master in group["params"]]
    assert held == [None] * len(held), "copies are gone after the step"
    moved = float(-deepspeed.utils.safe_get_full_fp32_param(model.weight).mean())
    assert moved == pytest.approx(float(x.mean()), rel=6e-4)


# ---- sums instead of means ------------------------------------------------------------------------------------------
@pytest.mark.sample("values", 5)
@pytest.mark.parametrize("more", [{}, {"prescale_gradients": True, "gradient_predivide_factor": 4.0}])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(2)
def test_gradients_can_be_added_up(rank, world, stage, more, dtype):
    fp16 = {"fp16": {"enabled": True, "loss_scale": SCALE}} if dtype == "fp16" else {}
    made = {**more, **fp16, "gradient_allreduce_op": "Sum", "zero": {"audit_steps": 1}}
    engine = start(make("plain"), stage, world, 2, dtype, **made)
    assert not engine.gradient_average
    for micro in range(2):
        backward(engine, 0, 2 * rank + micro, dtype)
        if micro == 0:
            engine.step()
    theirs = added_up(2 * world, 1 / 2)
    for name, p in engine.module.named_parameters():
        assert relative(safe_get_full_grad(p), theirs[name]) < ROUNDING[dtype], name
    engine.step()  # audited


# ---- what is not reduced yet ---------------------------------------------------------------------------------------
@pytest.mark.sample("values")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_inside_no_sync_the_gradient_is_this_ranks_own(rank, world, stage, dtype):
    engine = start(make("plain"), stage, world, 1, dtype)
    twin = make("plain").to(DTYPES[dtype])
    with engine.no_sync():
        for micro in range(2):
            backward(engine, micro, rank, dtype)
            loss_on(twin, micro, rank, DTYPES[dtype]).backward()
            for p, other in zip(engine.module.parameters(), twin.parameters()):
                found = safe_get_full_grad(p)
                assert found.dtype == torch.float32 and relative(found, other.grad) < ROUNDING[dtype]
        refused(AssertionError, "It is illegal to call Engine.step.. inside no_sync context manager", engine.step)
    backward(engine, 2, rank, dtype)
    whole = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    engine.step()
    assert identical(*together(whole)), "reduced: equal on all ranks"


@on_ranks(2)
def test_samples_that_were_seen_are_counted(rank, world):
    """Two of each micro-batch on two ranks: 4 samples for each micro-step."""
    counts = []
    for managed in (True, False):
        engine = start(make("plain"), 0, world, 2, "fp32", managed_gradient_accumulation=managed)
        for backwards in (2, 2, 2) if managed else (1, 3, 3):
            for micro in range(backwards):
                backward(engine, micro, rank, "fp32")
                if managed:
                    engine.step()
            with torch.no_grad():
                engine(data(0, 0)[0], 0, 0)  # trains nothing
            if not managed:
                engine.step()
        counts.append((engine.global_steps, engine.global_samples))
    assert counts == [(3, 24), (3, 28)]


# ---- ds_config explain ---------------------------------------------------------------------------------------------
EXPLAINED = [
    (
        {"bf16": {"enabled": True}},
        "kept in bf16, 2 bytes per parameter on each rank: the type of the parameters",
        "sent in bf16, the type they are kept in",
        "between backward and step they are the parameters' .grad",
    ),
    (
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}},
        "kept in fp32, 4/N bytes per parameter on each of N ranks: gradient_accumulation_steps is 4",
        'data_types.grad_accum_dtype "bf16" makes it 2/N bytes',
        "no .grad between backward and step (ZeRO",
    ),
    (
        {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "FP32"}, "communication_data_type": "fp16"},
        "kept in fp32, 4 bytes per parameter on each rank: data_types.grad_accum_dtype says so",
        "sent in fp16: communication_data_type says so; the copy that travels takes 2 bytes per parameter more",
        "no .grad between backward and step (its type",
    ),
]


@pytest.mark.parametrize("config, lines", [(config, lines) for config, *lines in EXPLAINED])
def test_explain_tells_type_bytes_and_reason(config, lines, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(str({"train_micro_batch_size_per_gpu": 1, **config}).replace("'", '"').replace("True", "true"))
    with redirect_stdout(io.StringIO()) as shown:
        assert cli.main(["explain", str(path)]) == 0
    for line in lines:
        assert line in shown.getvalue(), shown.getvalue()
