"""Masters, gradients and states of sharded parameters, read and set through deepspeed.utils, on real ranks."""

import pytest
import torch

import deepspeed
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from engine_models import adam_like, config, loss_on, make_net, train_engine
from harness import on_ranks
from plain import Plain
from refusals import refused
from runs import DTYPES, engine_of, together, value_of

STAGES = [0, 1, 2, 3]
HALF_ON_CPU = deepspeed.get_accelerator().is_fp16_supported()
needs_fp16 = pytest.mark.skipif(not HALF_ON_CPU, reason="this torch has no fp16 matrix product on this device")
PRECISIONS = {"fp32": (), "bf16": (), "fp16": needs_fp16}
OPTIMIZERS = ["AdamW", "torch"]
LR, BETAS, DECAY, EPS = 3e-3, (0.9, 0.95), 0.05, 1e-8  # as config() and adam_like() have them
SCALE = 128
CASES = [
    pytest.param(stage, precision, optimizer, id=f"stage{stage}-{precision}-{optimizer}", marks=marks)
    for stage in STAGES
    for precision, marks in PRECISIONS.items()
    for optimizer in OPTIMIZERS
]


def start(world, stage, precision, optimizer, accumulate=1):
    made = config(world, accumulate, gradient_clipping=0.0)
    made["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 300, "allgather_bucket_size": 200}
    if stage == 3:
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 20
    made.update({"fp16": {"enabled": True, "loss_scale": SCALE}} if precision == "fp16" else DTYPES[precision])
    model = make_net()
    return engine_of(model, made, adam_like(model.parameters()) if optimizer == "torch" else None)


def one_backward(engine, rank, world, step=0):
    engine.backward(loss_on(engine, step, rank=rank, world=world))


def trained(engine):
    """Trained parameters by name; the model's own are the same objects on every rank and in every stage."""
    return {name: p for name, p in engine.module.named_parameters() if p.requires_grad}


def plain(precision, world=2, step=0):
    """One process: the masters with, as ``.grad``, the fp32 means of what each rank's part of the batch gives."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    plain = Plain(make_net(), adam_like, dtype, scale=SCALE if precision == "fp16" else 1.0)
    plain.add(*(loss_on(plain.model, step, rank=rank, world=world) for rank in range(world)))
    for name, grad in plain.sums().items():
        plain.masters[name].grad = grad / world
    return plain.masters


def close(a, b, precision):
    """The sum over ranks is made in the parameters' dtype, and rounds there."""
    limit = {"fp32": 1e-6, "bf16": 4e-3, "fp16": 5e-4}[precision]
    return float((a.double() - b.double()).norm()) <= limit * float(b.double().norm())


@pytest.mark.sample("values", 6)
@pytest.mark.parametrize("stage, precision, optimizer", CASES)
@on_ranks(2)
def test_whole_tensors_are_those_of_one_process(rank, world, stage, precision, optimizer):
    engine = start(world, stage, precision, optimizer)
    params, reference = trained(engine), plain(precision)
    for name, p in params.items():
        full = safe_get_full_fp32_param(p)
        assert full.dtype == torch.float32 and full.shape == reference[name].shape, name
        assert close(full, reference[name].detach(), precision), name
        assert safe_get_full_grad(p) is None and safe_get_local_grad(p) is None, name
    one_backward(engine, rank, world)
    grads = {}
    for name, p in params.items():
        grad, expected = safe_get_full_grad(p), reference[name].grad
        assert (grad is None) == (expected is None), name
        grads[name] = grad
        if grad is not None:
            assert grad.dtype == torch.float32 and grad.shape == expected.shape, name
            assert close(grad, expected, precision), name
    before = {name: safe_get_full_fp32_param(p) for name, p in params.items()}
    engine.step()
    for name, p in params.items():
        assert safe_get_full_grad(p) is None, name
        full, grad = safe_get_full_fp32_param(p), grads[name]
        first, second = (safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq"))
        assert safe_get_full_optimizer_state(p, "no such state") is None
        if grad is None:
            assert torch.equal(full, before[name])
            continue
        assert first.shape == second.shape == full.shape
        assert torch.allclose(first, (1 - BETAS[0]) * grad, rtol=1e-5, atol=1e-10), name
        assert torch.allclose(second, (1 - BETAS[1]) * grad * grad, rtol=1e-5, atol=1e-12), name
        update = grad / (grad.abs() + EPS)
        assert torch.allclose(full, before[name] * (1 - LR * DECAY) - LR * update, rtol=1e-4, atol=1e-6), name
        assert torch.equal(value_of(p), full.to(p.dtype)), name
    first, second = together({name: safe_get_full_fp32_param(p) for name, p in params.items()})
    assert all(torch.equal(first[name], second[name]) for name in first)


def before_the_second_step(rank, world, stage, precision, optimizer):
    engine = start(world, stage, precision, optimizer)
    params = trained(engine)
    train_engine(engine, 1, rank, world)
    one_backward(engine, rank, world, 1)
    return engine, params


@pytest.mark.sample("values", 6)
@pytest.mark.parametrize("stage, precision, optimizer", CASES)
@on_ranks(2)
def test_what_is_set_is_what_the_next_step_uses(rank, world, stage, precision, optimizer):
    engine, params = before_the_second_step(rank, world, stage, precision, optimizer)
    wanted = {}
    torch.manual_seed(5)
    for name, p in params.items():
        shape = safe_get_full_fp32_param(p).shape
        weight, grad, first = torch.randn(shape), torch.randn(shape), torch.randn(shape)
        second = torch.rand(shape) + 0.5
        grad = grad.to(p.dtype).float()  # nothing accumulates: gradients are kept in the parameter's dtype
        wanted[name] = (weight, grad, first, second)
        safe_set_full_fp32_param(p, weight)
        safe_set_full_grad(p, grad)
        if safe_get_full_optimizer_state(p, "exp_avg") is None:
            refused(
                ValueError, "no optimizer state 'exp_avg' to set", safe_set_full_optimizer_state, p, first, "exp_avg"
            )
            wanted[name] = (weight, grad, torch.zeros(shape), torch.zeros(shape))
        else:
            safe_set_full_optimizer_state(p, first, "exp_avg")
            safe_set_full_optimizer_state(p, second.flatten(), "exp_avg_sq")
        refused(ValueError, "cannot take a value of shape", safe_set_full_grad, p, torch.zeros(shape.numel() + 1))
    for name, p in params.items():
        weight, grad, first, second = wanted[name]
        assert torch.equal(safe_get_full_fp32_param(p), weight), name
        assert torch.allclose(safe_get_full_grad(p), grad, rtol=1e-6), name
        if safe_get_full_optimizer_state(p, "exp_avg") is not None:
            assert torch.equal(safe_get_full_optimizer_state(p, "exp_avg"), first), name
            assert torch.equal(safe_get_full_optimizer_state(p, "exp_avg_sq"), second), name
        assert torch.equal(value_of(p), weight.to(p.dtype)), name
    engine.step()
    used = {name for name, param in plain("fp32").items() if param.grad is not None}
    for name, p in params.items():
        weight, grad, first, second = (t.double() for t in wanted[name])
        # a parameter without a step so far begins at step 1; "sometimes" is used by step 0 only
        step = 2 if name in used or name.startswith("sometimes") else 1
        first = BETAS[0] * first + (1 - BETAS[0]) * grad
        second = BETAS[1] * second + (1 - BETAS[1]) * grad * grad
        update = (first / (1 - BETAS[0] ** step)) / ((second / (1 - BETAS[1] ** step)).sqrt() + EPS)
        expected = weight * (1 - LR * DECAY) - LR * update
        assert torch.allclose(safe_get_full_fp32_param(p).double(), expected, rtol=1e-4, atol=1e-5), name
        assert torch.equal(value_of(p), safe_get_full_fp32_param(p).to(p.dtype)), name


@pytest.mark.sample("values", 6)
@pytest.mark.parametrize("stage, precision, optimizer", CASES)
@on_ranks(2)
def test_parts_of_ranks(rank, world, stage, precision, optimizer):
    engine, params = before_the_second_step(rank, world, stage, precision, optimizer)
    parts = {}
    for name, p in params.items():
        link = p._ds_link
        full = safe_get_full_fp32_param(p).flatten()
        local = safe_get_local_fp32_param(p)
        pieces = link.pieces("fp32")
        own = torch.cat([full[offset : offset + numel] for offset, numel, _ in pieces]) if pieces else None
        if stage == 3:
            assert local.shape == p.ds_tensor.shape
            owned = 0 if own is None else own.numel()
            assert own is None or torch.equal(local[:owned], own)
            assert not local[owned:].any(), "padding is zero"
        else:
            assert (local is None) == (own is None) and (local is None or torch.equal(local, own)), name
        parts[name] = 0 if own is None else own.numel()
        for get_full, get_local in (
            (safe_get_full_grad, safe_get_local_grad),
            (
                lambda q: safe_get_full_optimizer_state(q, "exp_avg"),
                lambda q: safe_get_local_optimizer_state(q, "exp_avg"),
            ),
        ):
            whole, part = get_full(p), get_local(p)
            if whole is None or own is None:
                assert part is None or not part.any(), name
                continue
            expected = torch.cat([whole.flatten()[offset : offset + numel] for offset, numel, _ in pieces])
            assert torch.allclose(part[: expected.numel()], expected, rtol=1e-6), name
            assert stage < 3 or part.shape == p.ds_tensor.shape
    # set: every rank its own part, with values that tell the ranks apart
    mark = rank if stage else 0
    for name, p in params.items():
        local = safe_get_local_fp32_param(p)
        safe_set_local_fp32_param(p, None if local is None else torch.full_like(local, mark + 1.0))
        grad = safe_get_local_grad(p)
        if grad is not None:
            safe_set_local_grad(p, torch.full_like(grad, mark + 10.0))
        elif parts[name]:
            refused(ValueError, "no gradient to set", safe_set_local_grad, p, torch.zeros(parts[name]))
        state = safe_get_local_optimizer_state(p, "exp_avg")
        if state is not None:
            safe_set_local_optimizer_state(p, torch.full_like(state, mark + 20.0), "exp_avg")
    found = {}
    for name, p in params.items():
        kept = (safe_get_full_fp32_param(p), safe_get_full_grad(p), safe_get_full_optimizer_state(p, "exp_avg"))
        assert torch.equal(value_of(p), kept[0].to(p.dtype)), name
        found[name] = [t.flatten().tolist() if t is not None else None for t in kept]
        refused(
            ValueError,
            "this rank's part has .* elements, the value 1000",
            safe_set_local_fp32_param,
            p,
            torch.zeros(1000),
        )
    (parts_0, found_0), (parts_1, found_1) = together(parts, found)
    assert found_0 == found_1, "all ranks see the same whole tensors"
    assert any(parts_0[name] and parts_1[name] for name in parts_0), "some parameter is cut"
    for name, (weight, grad, state) in found_0.items():
        own = (parts_0[name], parts_1[name])
        whole = len(weight)
        assert own == (whole, whole) if stage == 0 else sum(own) == whole
        if stage == 0:
            continue
        for values, base in ((weight, 1.0), (grad, 10.0), (state, 20.0)):
            if values is not None:
                assert (values.count(base), values.count(base + 1)) == own, (name, base)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_update_of_all_gradients(rank, world, stage):
    engine = start(world, stage, "fp32", "AdamW")
    one_backward(engine, rank, world)
    params = list(trained(engine).values())
    before = [safe_get_full_grad(p) for p in params]

    def doubled(grad, param):
        seen.append(param)
        if len(seen) % 2:
            return 2 * grad
        grad.mul_(2)  # in place does as well
        return None

    seen = []
    safe_update_full_grad_vectorized(iter(params), doubled)
    having = [p for p, grad in zip(params, before) if grad is not None]
    assert len(seen) == len(having) > 3 and all(a is b for a, b in zip(seen, having))
    for p, grad in zip(params, before):
        after = safe_get_full_grad(p)
        assert after is None if grad is None else torch.equal(after, 2 * grad)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_frozen_parameters(rank, world, stage, precision):
    engine = start(world, stage, precision, "AdamW")
    frozen = next(p for p in engine.module.parameters() if not p.requires_grad)
    assert safe_get_full_grad(frozen) is None and safe_get_full_optimizer_state(frozen, "exp_avg") is None
    assert safe_get_full_fp32_param(frozen) is None and safe_get_local_fp32_param(frozen) is None
    assert safe_get_local_grad(frozen) is None and safe_get_local_optimizer_state(frozen, "exp_avg") is None
    refused(ValueError, "no fp32 value to set", safe_set_full_fp32_param, frozen, torch.zeros(12, 12))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gradients_are_whole_after_the_last_micro_step(rank, world, stage):
    engine = start(world, stage, "fp32", "AdamW", accumulate=2)
    found = []
    for micro in range(2):
        engine.backward(loss_on(engine, 0, rank=2 * rank + micro, world=2 * world))
        found.append(safe_get_full_grad(engine.module.out.weight))
        engine.step()
    early, whole = found
    assert close(whole, plain("fp32", world=4)["out.weight"].grad, "fp32")
    assert (early is None) == (stage == 1)
    if stage != 1:
        assert torch.equal(*together(early)) == (stage >= 2)
