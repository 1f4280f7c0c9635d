"""The conformance matrix: stage x world x dtype x accumulation x model against one plain process.

Every rank process trains many engines one after the other, so that the matrix runs in minutes; each case is asserted on
its own in ``check``. `make test` runs a sample in which each pair of values appears, `make test-all` every case.
"""

import functools
import hashlib
import itertools

import pytest
import torch

import deepspeed
from harness import run_ranks
from runs import weights, with_fp16
from sampling import every_case, sample
from zero_models import BETAS, DECAY, LR, MODELS, PlainRun, engine_config, make, outputs_of, relative

STEPS = 10
LOOKS = (0, 1, STEPS - 1)  # steps whose gradients are compared
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGES = [0, 1, 2, 3]
ACCUMULATE = [1, 4]

# Largest relative difference of a gradient in any step, of a master after the last one, and of a gradient norm.
# 16 bits: the reference rounds the same products; what is left are gradients of a parameter that is used several times,
# which autograd adds up in 16 bits where we may add in 32, and weights on the edge between two 16-bit values.
BOUNDS = {"fp32": (1e-6, 1e-6, 1e-6), "bf16": (0.03, 3e-3, 0.03), "fp16": (0.004, 1e-3, 0.004)}


def reference(name, dtype, parts):
    if dtype == "fp32":
        return PlainRun(make(name), STEPS, parts, None if name == "several dtypes" else torch.float64)
    return PlainRun(make(name), STEPS, parts, DTYPES[dtype], loss_scale=128.0 if dtype == "fp16" else 1.0)


def whole(engine, stage, kind):
    """Gradients as the next step will see them, or masters, by parameter name; one collective, every rank calls it."""
    core = engine.core
    scale = engine.stepping.loss_scale if kind == "grad" else 1.0
    by_name = dict(engine.module.named_parameters())
    wholes = [empty_like(by_name[name]) for name in engine._param_names]
    for (index, offset, numel), piece in zip(core.pieces(), core.grads() if kind == "grad" else core.masters()):
        to = wholes[index]
        if piece.shape != to.shape:  # pieces have one dimension, in memory order
            to = to.as_strided((to.numel(),), (1,))[offset : offset + numel]
        to.copy_(piece.detach().double() / scale)
    if stage > 0:
        together = torch.cat([one.as_strided((one.numel(),), (1,)) for one in wholes])
        deepspeed.comm.all_reduce(together)
        for one, values in zip(wholes, together.split([one.numel() for one in wholes])):
            one.as_strided((one.numel(),), (1,)).copy_(values)
    used = core.used() if kind == "grad" else [True] * len(wholes)
    return {name: one for name, one, there in zip(engine._param_names, wholes, used) if there}


def empty_like(param):
    """fp64 zeros in the shape and memory order of the whole parameter (stage 3 keeps some in the order of indices)."""
    with deepspeed.zero.GatheredParameters(param):
        return torch.zeros_like(param.detach(), dtype=torch.float64)


def check_grad_attributes(engine, grads):
    """Without sharding users find the very gradients in ``.grad`` (those of 16-bit parameters are kept wider)."""
    for name, param in engine.module.named_parameters():
        if param.requires_grad and param.dtype != torch.bfloat16:
            assert (param.grad is None) == (name not in grads), name
            assert param.grad is None or torch.equal(param.grad, grads[name].to(param.dtype)), name


def train(name, stage, world, rank, dtype, accumulate, user_backward):
    """One engine for ``STEPS`` steps: ``(gradients of each step, masters, weights, norms)``."""
    model, config = make(name), engine_config(stage, world, accumulate, dtype)
    optimizer = None
    if name == "several dtypes":  # our own Adam refuses fp64
        del config["optimizer"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    grads, norms = {}, []
    for step in range(STEPS):
        for micro in range(accumulate):
            losses = outputs_of(engine, step, rank * accumulate + micro, DTYPES[dtype])
            for index, loss in enumerate(losses):
                more = index + 1 < len(losses)
                if user_backward:
                    loss.backward(retain_graph=more)
                else:
                    engine.backward(loss, retain_graph=more)
            if micro + 1 == accumulate and step in LOOKS:
                grads[step] = whole(engine, stage, "grad")
                if stage == 0 and dtype == "fp32":
                    check_grad_attributes(engine, grads[step])
            engine.step()
        norms.append(engine.get_global_grad_norm())
    assert engine.skipped_steps == 0
    return grads, whole(engine, stage, "master"), weights(engine), norms


def digest(tensors):
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].double().numpy().tobytes())
    return found.hexdigest()


def compare(expected, initial, found):
    """Worst relative differences and what must hold exactly."""
    grads, masters, weights, norms = found
    used = all(set(grads[step]) == set(expected.grads[step]) for step in LOOKS)
    gap_grad = max(
        (relative(grad, expected.grads[step][name]), f"{name}, step {step}")
        for step, found_step in grads.items()
        for name, grad in found_step.items()
        if name in expected.grads[step]
    )
    gap_master = max((relative(master, expected.masters[name]), name) for name, master in masters.items())
    shapes = all(masters[name].shape == expected.masters[name].shape for name in masters)
    rounded = all(torch.equal(masters[name].to(weights[name].dtype), weights[name]) for name in masters)
    frozen = all(
        torch.equal(weights[name], value.to(weights[name].dtype))
        for name, value in initial.items()
        if name not in masters
    )
    gap_norm = max(abs(a - b) / b for a, b in zip(norms, expected.norms))
    return {
        "grad": gap_grad,
        "master": gap_master,
        "norm": gap_norm,
        "the same parameters have gradients in each step": used,
        "shapes": shapes and set(masters) == set(expected.masters),
        "weights are the masters, rounded": rounded,
        "frozen ones have not changed": frozen,
    }


WORLDS = [1, 2, 3, 4]


@functools.lru_cache(None)
def chosen():
    """The cases of this run: (world, dtype, stage, accumulation, model)."""
    cases = list(itertools.product(WORLDS, DTYPES, STAGES, ACCUMULATE, MODELS))
    return cases if every_case() else [cases[index] for index in sample(cases)]


def stages_of(world, dtype):
    """{(accumulation, model): stages}: stages with one reference together."""
    found = {}
    for _, _, stage, accumulate, name in (case for case in chosen() if case[:2] == (world, dtype)):
        found.setdefault((accumulate, name), []).append(stage)
    return found


def body(rank, world, dtype, wanted):
    deepspeed.log.logger.setLevel("WARNING")  # a thousand engines describe themselves
    with with_fp16():
        return {
            (stage, accumulate, name): result
            for (accumulate, name), stages in wanted.items()
            for stage, result in cases(rank, world, dtype, accumulate, name, stages)
        }


def cases(rank, world, dtype, accumulate, name, stages):
    expected = reference(name, dtype, world * accumulate) if rank == 0 else None
    initial = dict(make(name).named_parameters())
    for stage in stages:
        user_backward = (stage + list(MODELS).index(name) + (accumulate > 1)) % 2 == 1
        found = train(name, stage, world, rank, dtype, accumulate, user_backward)
        yield stage, {**(compare(expected, initial, found) if rank == 0 else {}), "digest": digest(found[2])}


def check(dtype, results):
    bound_grad, bound_master, bound_norm = BOUNDS[dtype]
    failed = []
    for case, result in results[0].items():
        bounds = BOUNDS["bf16"] if case[2] == "several dtypes" and dtype == "fp32" else BOUNDS[dtype]
        for what, value in result.items():
            if what in ("grad", "master"):
                limit = bounds[0] if what == "grad" else bounds[1]
                if not value[0] <= limit:
                    failed.append((case, f"{what} differs by {value[0]:.2g} > {limit:g}: {value[1]}"))
            elif what == "norm":
                if not value <= bounds[2]:
                    failed.append((case, f"norm differs by {value:.2g} > {bounds[2]:g}"))
            elif what != "digest" and value is not True:
                failed.append((case, f"not true: {what}"))
        if len({ranks[case]["digest"] for ranks in results}) != 1:
            failed.append((case, "the ranks' weights differ"))
    assert not failed, "\n".join(f"stage {c[0]}, accumulation {c[1]}, {c[2]}: {why}" for c, why in failed)


@pytest.mark.sample("values")
@pytest.mark.parametrize("world, dtype", sorted({case[:2] for case in chosen()}))
def test_matrix(world, dtype):
    wanted = stages_of(world, dtype)
    results = run_ranks(world, body, dtype, wanted, timeout=120)
    whole = len(STAGES) * len(ACCUMULATE) * len(MODELS)
    assert len(results[0]) == sum(map(len, wanted.values())) > 0
    assert len(results[0]) == whole or not every_case()
    check(dtype, results)
