"""Runs that the tests share: an engine on a model, steps with it, and the tensors that a run leaves."""

import functools
import gc
from unittest import mock

import torch

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.param_cut import cut_of
from deepspeed.zero.parameters.param_ranks import SavedNames

TORCH2 = hasattr(torch, "compile")  # torch 1.13 otherwise
DTYPES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}}}
KEEP_GATHERED = {"stage3_param_persistence_threshold": 100000}  # the default: small parameters stay whole
SMALL_PARTS = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 20, "sub_group_size": 400}
NATIVE = {"writer": {"format": "safetensors"}}  # the section ``checkpoint`` of a run that saves without pickles


def initialized(model, settings, client=None, **given):
    """Returns the result of ``deepspeed.initialize``. ``client``: an optimizer, or a function of parameters that makes
    one; it replaces the optimizer of ``settings``."""
    if client is not None:
        settings = {name: value for name, value in settings.items() if name != "optimizer"}
        settings.setdefault("zero_allow_untested_optimizer", True)
        given["optimizer"] = client
    return deepspeed.initialize(model=model, config=settings, **given)


def engine_of(model, settings, client=None, **given):
    """The engine of ``initialized``."""
    return initialized(model, settings, client, **given)[0]


def settings(stage, rows=2, accumulate=1, dtype="fp32", optimizer="AdamW", rate=0.01, zero=(), **more):
    """A configuration in which no parameter stays gathered. ``rows``: of a micro-batch. ``optimizer``: a type, which
    gets ``rate``, or a section. ``zero`` is added to the section of ZeRO. Keys with the value None are left out."""
    made = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulate,
        "optimizer": {"type": optimizer, "params": {"lr": rate}} if isinstance(optimizer, str) else optimizer,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **dict(zero)},
        **DTYPES[dtype],
        **more,
    }
    return {name: value for name, value in made.items() if value is not None}


sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)  # of the parameters


def with_fp16():
    """A context in which any accelerator supports fp16, for models without matrix products: they run on a CPU."""
    return mock.patch.object(deepspeed.get_accelerator(), "is_fp16_supported", lambda: True)


def take_step(engine, loss, plain=False):
    """Ends a micro-batch, in which the script calls ``loss.backward()`` where ``plain``. The loss as a number."""
    loss.backward() if plain else engine.backward(loss)
    engine.step()
    return loss.item()


def train(engine, loss_at, steps, first=0, plain=False):
    """Takes ``steps`` steps. ``loss_at(step, micro)`` gives the loss of each micro-batch. Returns the losses."""
    return [
        take_step(engine, loss_at(step, micro), plain)
        for step in range(first, first + steps)
        for micro in range(engine.gradient_accumulation_steps())
    ]


def dtype_of(engine):
    return next(engine.module.parameters()).dtype


def weights(engine):
    """name -> weight, whole, of an engine or a model."""
    params = dict(getattr(engine, "module", engine).named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return joined(engine, {name: param.detach().clone() for name, param in params.items()})


def joined(engine, found):
    """``{name of a parameter: value}`` with the whole values where ranks share layers. Every rank calls it."""
    cuts = {name: cut_of(param) for name, param in getattr(engine, "module", engine).named_parameters()}
    return {name: value if cuts[name] is None else cuts[name].join(value) for name, value in found.items()}


def value_of(param):
    """The whole value that a model computes with."""
    with deepspeed.zero.GatheredParameters([param]):
        return param.detach().clone()


def weight_list(engine):
    return list(weights(engine).values())


def last_of(engine, values=weight_list):
    """``values`` of an engine that then ends."""
    found = values(engine)
    engine.destroy()
    return found


def moments(engine, kinds=("exp_avg", "exp_avg_sq")):
    """name -> its fp32 value and its optimizer states, whole, of what is trained."""
    return {
        name: [safe_get_full_fp32_param(param), *(safe_get_full_optimizer_state(param, kind) for kind in kinds)]
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }


def everything(engine):
    """Weights, masters and states, whole; None for a state that nobody has made."""
    states = moments(engine, engine.optimizer.state_names()).values()
    return weight_list(engine) + [tensor for tensors in states for tensor in tensors]


def equal_bits(trained, *ways):
    """Training leaves the same bits in all ways. ``trained(way)``: an engine, and what else is to be equal."""
    found = []
    for way in ways:
        engine, seen = trained(way)
        found.append((seen, last_of(engine, everything)))
        del engine
        gc.collect()  # files go with the parameters, which a circle of Python objects may hold
    assert all(identical(found[0], other) for other in found[1:])


def states_of(engine):
    """name in checkpoints -> fp32 value and moments, whole, or the buffer; numbers, as ranks return them."""
    named = SavedNames(engine.module)
    found = {named(name): [one.tolist() for one in tensors] for name, tensors in moments(engine).items()}
    return {**found, **{named(name): buffer.tolist() for name, buffer in engine.module.named_buffers()}}


def save_midway(engine, train_one, folder, states=states_of, before=2, after=1):
    """Trains, saves and goes on. ``train_one()`` takes a step and returns its loss. Returns the states that were saved,
    the losses after that, and the states at the end."""
    for _ in range(before):
        train_one()
    engine.save_checkpoint(folder, tag="t", client_state={"mine": 7})
    return states(engine), [train_one() for _ in range(after)], states(engine)


def go_on(engine, train_one, folder, states=states_of, tag="t", after=1):
    """Loads what ``save_midway`` has saved, and returns the same as that."""
    for buffer in engine.module.buffers():
        buffer.zero_()
    _, client_state = engine.load_checkpoint(folder, tag=tag)
    assert client_state["mine"] == 7
    return states(engine), [train_one() for _ in range(after)], states(engine)


def load_into(engine, folder, **options):
    """The engine, after ``load_checkpoint``."""
    engine.load_checkpoint(folder, **options)
    return engine


def by_rank_0(rank, call, *given):
    """Makes a call on rank 0, which all ranks wait for."""
    if rank == 0:
        call(*given)
    deepspeed.comm.barrier()


def load_or_error(engine, folder, **options):
    """ "loaded", or the type and the text of what a load of ``save_midway`` raises."""
    try:
        engine.load_checkpoint(folder, tag="t", **options)
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def raised(call, *given, **named):
    """The type and the text of the error that a call raises, or None."""
    try:
        call(*given, **named)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def same_states(loaded, saved):
    """The results of ``go_on`` on all ranks have every state of ``save_midway`` on any rank, bit by bit."""
    known = {name: value for states, *_ in saved for name, value in states.items()}
    assert {name for states, *_ in loaded for name in states} == known.keys()
    for states, *_ in loaded:
        for name, value in states.items():
            assert value == known[name], name


def total(group, value):
    """The sum of ``value`` over a group: the group works, and this rank is in it."""
    x = torch.tensor([float(value)])
    deepspeed.comm.all_reduce(x, group=group)
    return int(x)


def together(*values):
    """The values of all ranks, in the order of the ranks: a value of each, or a tuple."""
    found = [None] * deepspeed.comm.get_world_size()
    deepspeed.comm.all_gather_object(found, values if len(values) > 1 else values[0])
    return found


def identical(a, b):
    """Whether two values are equal bit by bit: tensors, and dicts and sequences of what is."""
    if torch.is_tensor(a) or torch.is_tensor(b):
        return torch.is_tensor(a) and torch.is_tensor(b) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b))
    return a == b
