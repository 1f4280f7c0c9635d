"""Random losses of scripts that run ``loss.backward()`` themselves, beside the same in one plain process.

A case is plain values. Its loss is a sum of terms, of which only some are outputs of ``engine.forward``.
"""

import copy
import functools
import random

import torch

import deepspeed
from models import Parts, seeded
from plain import Plain
from runs import engine_of, with_fp16

RATE = 0.02
STAGES = [(0, 0), (1, 0), (2, 0), (3, 100000), (3, 0)]  # and up to how many elements stay gathered
TERMS = ("output", "penalty", "input gradient", "returned", "weight gradient", "kept", "direct", "twice")
OWN_ENDS = ("one backward", "a backward for each", "retained", "engine")


def forward_net(net, x):
    """No matrix product, so that fp16 runs on a CPU. ``kept``: what the script finds in the module."""
    hidden = x * net.first + net.shift
    net.kept = hidden * hidden * net.second
    return net.kept.sum(-1), net.second


def make_net():
    return Parts(
        forward_net,
        first=torch.nn.Parameter(0.3 * torch.randn(5)),
        shift=torch.nn.Parameter(0.3 * torch.randn(5)),
        second=torch.nn.Parameter(0.3 * torch.randn(5)),
    )


def term_of(name, net, module, x):
    """One term of a loss: ``net`` is the engine, or the module itself in a plain process."""
    if name == "output":
        return net(x)[0].float().pow(2).mean()
    if name == "penalty":
        return sum(0.1 * p.float().pow(2).sum() for p in module.parameters())
    if name == "returned":
        out, weight = net(x)
        return out.float().mean() + weight.float().abs().sum()
    if name == "kept":
        return net(x)[0].float().mean() + module.kept.float().pow(2).mean()
    if name == "direct":
        return module(x)[0].float().pow(2).mean()
    if name == "twice":
        return (net(x)[0] * net(0.5 * x)[0]).float().mean()
    x = x.clone().requires_grad_()
    out = net(x)[0].float().pow(2).sum()
    (grad,) = torch.autograd.grad(out, x if name == "input gradient" else module.second, create_graph=True)
    return grad.float().pow(2).mean() + 0.1 * out


def case_of(seed):
    rng = random.Random(seed)
    stage, persist = rng.choice(STAGES)
    return {
        "seed": seed, "stage": stage, "persist": persist, "accumulate": rng.choice((1, 2, 3)),
        "dtype": rng.choice(("fp32", "fp32", "bf16", "fp16")), "terms": rng.sample(TERMS, rng.choice((1, 2, 2, 3))),
        "end": rng.choice(OWN_ENDS), "steps": 2,
    }  # fmt: skip


def inputs(seed, number, rank, dtype):
    generator = torch.Generator().manual_seed(1000003 * seed + 101 * number + rank)
    return torch.randn(3, 5, generator=generator).clamp(-1, 1).to(dtype)


def backward_of(case, net, module, x, engine=None, scale=1.0):
    """Runs the backwards of one micro-batch. Of a plain process, times ``scale``."""
    losses = [term_of(name, net, module, x) for name in case["terms"]]
    if engine is not None and case["end"] == "engine":
        return engine.backward(sum(losses))
    if case["end"] in ("one backward", "engine"):
        return (sum(losses) * scale).backward()
    for loss in losses:
        (loss * scale).backward(retain_graph=case["end"] == "retained")


def may_be_refused(case):
    """Cases in which a clear error is right: at stage 3 weights are not there outside of modules, and with fp16 only
    what comes through outputs gets the loss scale."""
    terms = set(case["terms"])
    released = (
        case["stage"] == 3 and case["persist"] == 0 and terms & {"penalty", "returned", "weight gradient", "kept"}
    )
    unscaled = case["dtype"] == "fp16" and case["end"] != "engine" and terms - {"output", "twice"}
    return bool(released or unscaled)


def run_case(rank, world, case):
    """The reason why the case is wrong, or None."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case["dtype"]]
    sgd = functools.partial(torch.optim.SGD, lr=RATE)
    plain = Plain(seeded(make_net, seed=case["seed"]), sgd, dtype)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": case["accumulate"],
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": case["persist"]},
        "zero_allow_untested_optimizer": True,
        **({case["dtype"]: {"enabled": True}} if case["dtype"] != "fp32" else {}),
    }
    if case["dtype"] == "fp16":
        config["fp16"]["initial_scale_power"] = 7
    with with_fp16():
        engine = engine_of(copy.deepcopy(plain.model).float(), config, sgd)
    number = 0
    for _ in range(case["steps"]):
        start, error = number, None
        try:
            for _ in range(case["accumulate"]):
                backward_of(case, engine, engine.module, inputs(case["seed"], number, rank, dtype), engine)
                engine.step()
                number += 1
        except (RuntimeError, ValueError) as told:
            error = told
        errors = [None] * world
        torch.distributed.all_gather_object(errors, None if error is None else str(error))
        if any(errors):
            good = may_be_refused(case) and all(errors) and all(len(text) > 20 for text in errors)
            return None if good else f"{errors}"
        if engine.skipped_steps:  # fp16: a gradient times the loss scale was too large
            return None
        before = [master.detach().clone() for master in plain.masters.values()]
        for micro in range(start, number):
            for other in range(world):
                backward_of(case, plain.model, plain.model, inputs(case["seed"], micro, other, dtype))
                plain.collect()
        plain.update({name: grad / (world * case["accumulate"]) for name, grad in plain.sums().items()})
        moved = max((m - b).abs().max().item() for m, b in zip(plain.masters.values(), before))
        limit = 1e-5 * max(1.0, moved) if case["dtype"] == "fp32" else 0.03 * moved + 2e-3
        for (name, param), master in zip(engine.module.named_parameters(), plain.masters.values()):
            off = (deepspeed.utils.safe_get_full_fp32_param(param).cpu() - master).abs().max().item()
            if off > limit:
                return f"'{name}' is {off:.1e} from plain PyTorch's, which moved by {moved:.1e}"
    return None


def run_cases(rank, world, cases):
    """``[(case, what is wrong)]``."""
    found = []
    for case in cases:
        problem = run_case(rank, world, case)
        if problem is not None:
            found.append((case, problem))
    return found
