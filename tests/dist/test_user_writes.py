"""Weights that somebody writes after ``deepspeed.initialize``: what the user has written counts, at every stage."""

import io

import pytest
import torch

import deepspeed
from deepspeed.zero.core import writing
from deepspeed.zero.parameters.sharded_parameter import is_sharded
from harness import on_ranks
from models import Parts
from refusals import refused
from runs import engine_of, settings, take_step, value_of


def forward(net, x):  # a function with a name, for pickles
    return net.last(torch.tanh(net.frozen(torch.tanh(net.first(x.to(net.first.weight.dtype))))))


def net_of():
    return Parts(
        forward,
        first=torch.nn.Linear(6, 40),
        frozen=torch.nn.Linear(40, 40).requires_grad_(False),
        last=torch.nn.Linear(40, 1),
    )


def made_engine(stage, dtype="fp32", offload=None, rate=0.0, **zero):
    """A rate of 0 leaves the weights as they are: a step shows what masters say."""
    torch.manual_seed(2)
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    adam = {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.0}}
    return engine_of(net_of(), settings(stage, dtype=dtype, optimizer=adam, zero=zero))


def step(engine, rank=0):
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(rank))
    take_step(engine, engine(x).float().square().mean())


# ---- param.data = tensor -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2, init=True)
def test_replaced_data_is_trained(rank, world, stage, dtype):
    engine = made_engine(stage, dtype, rate=0.1)
    weight = engine.module.first.weight
    for _ in range(2):
        weight.data = torch.full_like(weight, 0.25)
        step(engine, rank)
        once = weight.detach().clone()
        assert not torch.equal(once, torch.full_like(once, 0.25))  # the step has trained what the model computes with
        assert (once - 0.25).abs().max() < 0.2
        step(engine, rank)
        assert not torch.equal(weight, once)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(1, init=True)
def test_another_shape_or_dtype_is_an_error(rank, world, stage):
    engine = made_engine(stage)
    weight = engine.module.first.weight
    kept, x = weight.data, torch.zeros(2, 6)
    for wrong, text in ((kept[:3].clone(), r"is Float \[3, 6\]"), (kept.double(), "is Double")):
        weight.data = wrong
        refused(RuntimeError, r"parameter 'first.weight' was Float \[40, 6\].* " + text, engine, x)
        refused(RuntimeError, "parameter 'first.weight' was", engine.step)
        weight.data = kept
    step(engine)
    assert torch.equal(weight, kept)


@on_ranks(1, init=True)
def test_a_dtype_and_back_keeps_training(rank, world):
    """Autograd forgets the accumulator of a parameter whose data change their dtype, and with it the engine's hook."""
    engine = made_engine(1, rate=0.1)
    step(engine)
    engine.module.double()
    engine.module.float()
    before = engine.module.first.weight.detach().clone()
    step(engine)
    assert not torch.equal(engine.module.first.weight, before)


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(1, init=True)
def test_who_puts_averages_in_and_takes_them_out_has_the_old_weights_again(rank, world, stage):
    engine = made_engine(stage, rate=0.1)
    step(engine)
    params = [p for p in engine.module.parameters() if p.requires_grad]
    kept = [p.data for p in params]
    values = [k.clone() for k in kept]
    for param in params:
        param.data = torch.zeros_like(param)
    with torch.no_grad():
        assert torch.equal(engine(torch.ones(2, 6)), torch.zeros(2, 1))
    assert all(torch.equal(k, v) for k, v in zip(kept, values))
    for param, old in zip(params, kept):
        param.data = old
    with torch.no_grad():
        engine(torch.ones(2, 6))
    assert all(torch.equal(p, v) for p, v in zip(params, values))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(1, init=True)
def test_new_parameters_in_a_module(rank, world, stage):
    engine = made_engine(stage)
    layer, old = engine.module.first, engine.module.first.weight
    layer.weight = torch.nn.Parameter(torch.full((40, 6), 0.5))
    if stage == 3:
        refused(RuntimeError, "'first.weight' was replaced .*assign=False", engine, torch.zeros(2, 6))
    else:
        step(engine)
        assert layer.weight is old and torch.equal(old, torch.full((40, 6), 0.5))


# ---- writes in place -----------------------------------------------------------------------------------------------
BESIDE = [(0, "bf16", False), *((stage, dtype, dtype == "fp32") for stage in (1, 2, 3) for dtype in ("bf16", "fp32"))]


@pytest.mark.parametrize("stage, dtype, offload", BESIDE)
@on_ranks(2, init=True)
def test_loaded_weights_stay(rank, world, stage, dtype, offload):
    engine = made_engine(stage, dtype, offload)
    step(engine, rank)
    shapes = {"first.weight": (40, 6), "first.bias": (40,), "last.weight": (1, 40), "last.bias": (1,)}
    state = {name: torch.full(shape, 0.375) for name, shape in shapes.items()}
    engine.module.load_state_dict(state, strict=False)
    step(engine, rank)
    for param in (engine.module.first.weight, engine.module.last.bias):
        assert torch.equal(value_of(param), torch.full_like(value_of(param), 0.375))
        assert deepspeed.utils.safe_get_full_fp32_param(param).unique().tolist() == [0.375]


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage, dtype, offload", BESIDE)
@on_ranks(2, init=True)
def test_only_written_elements_change(rank, world, stage, dtype, offload, folder):
    engine = made_engine(stage, dtype, offload, rate=1e-4, stage3_param_persistence_threshold=10**6)
    step(engine, rank)  # masters are no values of bf16 from here on
    param = engine.module.first.weight
    before = deepspeed.utils.safe_get_full_fp32_param(param)
    with torch.no_grad():
        param[0].fill_(2.0)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    step(engine, rank)
    after = deepspeed.utils.safe_get_full_fp32_param(param)
    assert torch.equal(after[0], torch.full((6,), 2.0))
    assert torch.equal(after[1:], before[1:])  # masters of other elements keep what bf16 cannot hold
    assert torch.equal(value_of(param)[0].float(), torch.full((6,), 2.0))
    with torch.no_grad():
        param[0].fill_(3.0)
    engine.save_checkpoint(folder)
    after = deepspeed.utils.safe_get_full_fp32_param(param)
    assert torch.equal(after[0], torch.full((6,), 3.0))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2, init=True)
def test_edits_of_one_rank_reach_all(rank, world, stage, dtype):
    engine = made_engine(stage, dtype)
    module = engine.module
    edited = [module.first.weight, module.frozen.bias, module.last.bias]
    with torch.no_grad(), deepspeed.zero.GatheredParameters(edited, modifier_rank=1):
        if rank == 1:
            for number, param in enumerate(edited):
                param.fill_(number + 0.5)
    step(engine, rank)
    assert [value_of(param).unique().tolist() for param in edited] == [[0.5], [1.5], [2.5]]


# ---- a write that fails --------------------------------------------------------------------------------------------
@on_ranks(2, init=True)
def test_writes_after_a_failed_one_are_seen(rank, world):
    engine = made_engine(3)
    step(engine, rank)
    core, weight = engine.core, engine.module.first.weight
    with pytest.raises(ArithmeticError):
        with writing(core):
            raise ArithmeticError
    states = engine.optimizer.state_dict()
    states["fp32_flat_groups"] = [flat[:3] for flat in states["fp32_flat_groups"]]
    refused(
        (ValueError, KeyError, IndexError, RuntimeError),
        None,
        engine.optimizer.load_state_dict,
        [states] * world,
        load_from_fp32_weights=True,
    )
    with torch.no_grad(), deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.fill_(0.125)
    assert value_of(weight).unique().tolist() == [0.125]


# ---- pickling ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2, init=True)
def test_a_trained_module_is_pickled(rank, world, stage):
    dtype = "bf16"
    engine = made_engine(stage, dtype, rate=0.1)
    step(engine, rank)
    x = torch.randn(2, 6)
    with torch.no_grad():
        expected = engine(x)
    params = [p for p in engine.module.parameters() if is_sharded(p)]
    with deepspeed.zero.GatheredParameters(params):
        file = io.BytesIO()
        torch.save(engine.module, file)
    file.seek(0)
    loaded = torch.load(file, **({"weights_only": False} if torch.__version__ >= "2" else {}))
    with torch.no_grad():
        assert torch.equal(loaded(x), expected)
    assert all(type(param) is torch.nn.Parameter for param in loaded.parameters())
    made_engine(stage, dtype).destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(1, init=True)
def test_a_part_of_a_model_is_saved_alone(rank, world, stage):
    """40 + 1 numbers of 4 bytes and what torch.save adds; the model has 1,961."""
    engine = made_engine(stage)
    step(engine)

    def size(what):
        file = io.BytesIO()
        torch.save(what, file)
        return len(file.getvalue())

    last = engine.module.last
    assert max(map(size, (last, last.state_dict(), last.weight, last.weight.detach()))) < 4000
