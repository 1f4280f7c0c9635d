"""Claims of tests about engines: ``equals_plain`` and ``goes_on``. ``refusals.refused``: a call is refused."""

import functools
import random

import numpy
import torch

import deepspeed
import devices
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from plain import Plain
from programs import PROGRAMS
from runs import engine_of, identical, joined, take_step, together, weights, with_fp16
from zero_models import relative

TYPES = {"fp32": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}  # in which the plain process computes


@functools.lru_cache(16)
def exact_of(name, parts):
    """The program in one plain process in fp64 that begins with the weights of a run in bf16."""
    program = PROGRAMS[name]
    model = program.make().bfloat16().double()
    return Plain(model, program.plain, torch.float64, clip=program.clip).run(program.losses, range(program.steps), parts)


def twice_of(program, plain, exact, steps):
    """``(kind, relative difference, where)`` of all values of ``plain``, twice that. ``steps``: of the gradients."""
    grads = {step: plain.grads[step] for step in steps}
    for kind, gap, where in gaps_of(program, exact, grads, plain.masters, {}, plain.means, plain.norms):
        yield kind, 2 * gap, where


@functools.lru_cache(16)
def plain_of(name, dtype, parts):
    """The program in one plain process, which has the micro-batches of all ranks."""
    program = PROGRAMS[name]
    kind = None if dtype == "fp32" and program.keeps_types else TYPES[dtype]
    more = {"scale": 128.0} if dtype == "fp16" else {}
    more.update(clip=program.clip, schedule=program.schedule, copied=False)  # torch does not copy all layers
    plain = Plain(program.make(), program.plain, kind, **more)
    plain.model.recompute, plain.model.reentrant = False, None
    return plain.run(program.losses, range(program.steps), parts)


def started(program, case, model=None, client=None):
    """An engine for a program. ``model`` and ``client``, an optimizer, replace those that the program makes."""
    deepspeed.log.logger.setLevel("WARNING")
    if client is None and not isinstance(program.optimizer, dict):
        client = program.optimizer
    model = program.make() if model is None else model
    more = {"lr_scheduler": program.schedule, "training_data": program.data}
    with with_fp16():
        return engine_of(model, case.config(program), client, **more)


def whole(engine, kind):
    """Gradients as the next step will see them, or masters, by parameter name; one collective, every rank calls it. On
    a device they are asked for as scripts do it, which waits for the device."""
    if devices.NAME != "cpu":
        get = safe_get_full_grad if kind == "grad" else safe_get_full_fp32_param
        found = {name: get(param) for name, param in engine.module.named_parameters() if param.requires_grad}
        return joined(engine, {name: one.cpu() for name, one in found.items() if one is not None})
    core = engine.core
    scale = engine.stepping.loss_scale if kind == "grad" else 1.0
    by_name = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters([by_name[name] for name in engine._param_names]):
        # In the order of memory of the whole parameter: stage 3 keeps some in the order of indices.
        wholes = [torch.zeros_like(by_name[name].detach(), dtype=torch.float64) for name in engine._param_names]
    flat = [one.as_strided((one.numel(),), (1,)) for one in wholes]
    for (index, offset, numel), piece in zip(core.pieces(), core.grads() if kind == "grad" else core.masters()):
        to = wholes[index] if piece.shape == wholes[index].shape else flat[index][offset : offset + numel]
        to.copy_(piece.detach().double() / scale)
    if engine.zero_optimization_stage() > 0:
        stacked = torch.cat(flat)
        deepspeed.comm.all_reduce(stacked, group=engine.parallel.dp_group)
        for one, values in zip(flat, stacked.split([one.numel() for one in flat])):
            one.copy_(values)
    used = core.used() if kind == "grad" else [True] * len(wholes)
    return joined(engine, {name: one for name, one, there in zip(engine._param_names, wholes, used) if there})


def check_grad_attributes(engine, grads):
    """Without sharding users find the very gradients in ``.grad`` (those of 16-bit parameters are kept wider)."""
    for name, param in engine.module.named_parameters():
        if param.requires_grad and param.dtype != torch.bfloat16:
            assert (param.grad is None) == (name not in grads), name
            assert param.grad is None or torch.equal(param.grad, grads[name].to(param.dtype)), name


def train(engine, rank, program, case):
    """Trains ``engine`` on this rank's micro-batches: gradients of some steps, the mean losses and norms of all."""
    grads, losses, norms, rank = {}, [], [], engine.parallel.data_rank
    for step in range(program.steps):
        seen = []
        for micro in range(case.accumulate):
            found = program.losses(engine, step, rank * case.accumulate + micro)
            found = found if isinstance(found, list) else [found]
            for index, loss in enumerate(found):
                more = {"retain_graph": index + 1 < len(found)}
                loss.backward(**more) if case.user_backward else engine.backward(loss, **more)
            if micro + 1 == case.accumulate and step in (0, 1, program.steps - 1):
                params = engine.module.named_parameters() if case.stage == 3 else ()
                kept = [one for one, param in params if param.numel() and not param.ds_persist]
                assert not kept, f"parameters stay whole after backward: {kept}"
                grads[step] = whole(engine, "grad")
                if case.stage == 0 and case.tensor == 1 and case.dtype == "fp32" and devices.NAME == "cpu":
                    check_grad_attributes(engine, grads[step])
            engine.step()
            seen += [loss.item() for loss in found]
        losses.append(sum(seen) / len(seen))
        norms.append(engine.get_global_grad_norm())
    assert engine.skipped_steps == 0
    return grads, losses, norms


def states_of(engine, names):
    """name -> the whole states of a trained parameter."""
    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad and names:
            states = [safe_get_full_optimizer_state(param, state) for state in names]
            found[name] = [joined(engine, {name: state})[name] for state in states]
            assert safe_get_full_optimizer_state(param, "no_such_state") is None
    return found


def gaps_of(program, plain, grads, masters, states, losses, norms):
    """``(kind, relative difference, where)`` of all values."""
    for step, found in grads.items():
        assert set(found) == set(plain.grads[step]), f"step {step}: other parameters have gradients"
        for name, grad in found.items():
            yield "grad", relative(grad, plain.grads[step][name]), f"{name}, step {step}"
    for name, master in masters.items():
        assert master.shape == plain.masters[name].shape, name
        yield "master", relative(master, plain.masters[name]), name
    for name, found in states.items():
        wanted = plain.optimizer.state.get(plain.masters[name])
        for (kind, theirs), state in zip(program.states.items(), found):
            if wanted:  # of a parameter that has had a gradient
                assert state.shape == wanted[theirs].shape and state.dtype == torch.float32, (name, kind)
                yield "state", relative(state, wanted[theirs]), f"{kind} of {name}"
    for kind, found, wanted in (("norm", norms, plain.norms), ("loss", losses, plain.means)):
        for step, (a, b) in enumerate(zip(found, wanted, strict=True)):
            yield kind, abs(a - b) / abs(b), f"step {step}"


def worst_of(gaps):
    """kind -> ``(largest difference, where)``."""
    worst = {}
    for kind, gap, where in gaps:
        worst[kind] = max(worst.get(kind, (0.0, "")), (gap, where))
    return worst


def equals_plain(rank, name, case, model=None, client=None):
    """An engine trains the program as one plain process does. Every rank calls it. ``model`` and ``client`` are those
    of ``started``. Returns the engine.

    Compares losses, norms, gradients of three steps, parameters and the optimizer's states. The ranks have the same
    weights, which are the rounded masters, and frozen ones have not changed.
    """
    program = PROGRAMS[name]
    engine = started(program, case, model, client)
    grads, losses, norms = train(engine, rank, program, case)
    masters, found, states = whole(engine, "master"), weights(engine), states_of(engine, program.states)
    same = together({one: value.cpu().double().numpy().tobytes() for one, value in found.items()}, losses)
    assert all(bits == same[0][0] for bits, _ in same), "the ranks' weights differ"
    if rank:
        return engine
    plain = plain_of(name, case.dtype, case.parts)
    trained = {one for one, master in plain.masters.items() if master.requires_grad}
    assert set(masters) == trained
    for one, initial in program.make().named_parameters():
        wanted = masters.get(one, initial.detach()).to(found[one].dtype)
        assert torch.equal(found[one], wanted.to(found[one].device)), f"{one} is not its rounded master, or not frozen"
    losses = [sum(step) / case.world for step in zip(*(own for _, own in same))]
    bounds, wanted = program.bounds[case.dtype], plain
    if bounds is None:
        wanted = exact_of(name, case.parts)
        bounds = {kind: gap for kind, (gap, _) in worst_of(twice_of(program, plain, wanted, list(grads))).items()}
    else:
        bounds = bounds._asdict()
    worst = worst_of(gaps_of(program, wanted, grads, masters, states, losses, norms))
    bounds["grad"] *= 1 if devices.NAME == "cpu" else 10
    wrong = [
        f"{kind} differs by {gap:.2g} > {bounds[kind]:g}: {where}"
        for kind, (gap, where) in worst.items()
        if not gap <= bounds[kind]
    ]
    assert not wrong, "; ".join(wrong)
    return engine


# ---- resumed runs -------------------------------------------------------------------------------------------------
def draw_from(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def comparable(value):
    """State dicts without objects that compare by identity."""
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items() if k != "loss_scaler"}
    return [comparable(v) for v in value] if isinstance(value, (list, tuple)) else value


def run(engine, rank, program, steps, batches=None):
    """Trains ``steps`` steps: the losses, and everything that the engine holds after them."""
    losses, accumulate = [], engine.gradient_accumulation_steps()
    for step in steps:
        for micro in range(accumulate):
            data = rank * accumulate + micro if batches is None else next(batches)
            losses.append(take_step(engine, program.losses(engine, step, data)))
    counts = engine.global_steps, engine.skipped_steps, engine.global_samples, engine.micro_steps
    return losses, weights(engine), engine.get_lr(), comparable(engine.optimizer.state_dict()), counts


def batches_of(engine):
    """The batches of an engine's loader, epoch after epoch, or None."""
    loader = engine.training_dataloader
    return None if loader is None else iter(deepspeed.utils.RepeatingLoader(loader))


def goes_on(rank, name, saved_in, loaded_in, folder, before=5, after=6, **saving):
    """A run that is saved in one case goes on in another, from other weights and numbers, as it does undisturbed, bit
    by bit. Every rank calls it. ``saving``: arguments of ``save_checkpoint``. Returns what the load returned."""
    program = PROGRAMS[name]
    engine = started(program, saved_in)
    draw_from(7 + rank)
    batches = batches_of(engine)
    run(engine, rank, program, range(before), batches)
    state = {"epoch": 3, "best": torch.tensor([0.5, 2.0])}
    engine.save_checkpoint(folder, client_state=state, **saving)
    straight = run(engine, rank, program, range(before, before + after), batches)
    model = program.make()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    other = started(program, loaded_in, model)
    draw_from(99)
    path, found = other.load_checkpoint(folder)
    assert found["epoch"] == 3 and torch.equal(found["best"], state["best"])
    assert identical(dict(engine.module.named_buffers()), dict(other.module.named_buffers()))
    resumed = run(other, rank, program, range(before, before + after), batches_of(other))
    for what, one, two in zip(("losses", "weights", "rates", "states", "counts"), straight, resumed):
        assert identical(one, two), f"{what} of the resumed run differ: {one} and {two}"
    return path, found
