"""Uses of a model at ZeRO stage 3, beside training it."""

import os

import pytest
import torch

import deepspeed
from engine_models import (
    adam_like,
    config,
    difference,
    loss_on,
    make_net,
    net_engine,
    plain_net,
    train_engine,
    uses_extra,
)
from harness import on_ranks
from models import Parts, seeded
from plain import Plain
from refusals import refused
from runs import engine_of, settings, together, value_of
from runs import weights as whole


def make_engine(world, model=None, **zero):
    return net_engine(world, 3, model=model, zero={"stage3_param_persistence_threshold": 20, **zero})


def whole_model(engine):
    """The trained weights in a model of one process."""
    found = make_net()
    for mine, value in zip(found.parameters(), whole(engine.module).values()):
        mine.data.copy_(value)
    return found


@pytest.mark.parametrize("before_engine", [False, True], ids=["in the engine", "in zero.Init"])
@on_ranks(2)
def test_load_state_dict_with_whole_tensors(rank, world, before_engine):
    wanted = make_net(seed=3)
    if before_engine:
        with deepspeed.zero.Init(dtype=torch.float32):
            model = make_net(seed=1)
        model.load_state_dict(wanted.state_dict())
        engine = make_engine(world, model)
    else:
        engine = make_engine(world)
        engine.module.load_state_dict(wanted.state_dict())
    assert all(torch.equal(v, dict(wanted.named_parameters())[n]) for n, v in whole(engine.module).items())
    train_engine(engine, 3, rank, world)
    plain = Plain(wanted, adam_like, clip=0.5)
    plain.run(lambda model, step, part: loss_on(model, step, extra=uses_extra(step)), range(3))
    assert difference(whole_model(engine), plain.model) < 1e-6


@pytest.mark.parametrize("persistent", [False, True])
@on_ranks(2, timeout=30)
def test_the_modifier_may_load_a_state_dict_alone(rank, world, persistent):
    zero = {"stage3_param_persistence_threshold": 1000 if persistent else 0}
    engine = make_engine(world, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), **zero)
    module = engine.module
    params = list(module.parameters())
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
        if rank == 0:
            module.load_state_dict({name: torch.full_like(p, 3.0) for name, p in module.named_parameters()})
    assert all(bool((value_of(p) == 3.0).all()) for p in params)
    assert all(bool((deepspeed.utils.safe_get_full_fp32_param(p) == 3.0).all()) for p in params)


@on_ranks(2)
def test_generation_gathers_once_and_training_goes_on(rank, world):
    engine = make_engine(world)
    tokens = torch.arange(6).reshape(1, 6) + rank
    with deepspeed.zero.unwrap_model_for_generation(engine) as model, torch.no_grad():
        fetches = engine.core.gatherer.fetches
        for _ in range(3 + 4 * rank):  # ranks generate different lengths
            out = model(tokens)
        assert engine.core.gatherer.fetches == fetches
        assert torch.equal(out, make_net()(tokens))
    losses, _ = train_engine(engine, 3, rank, world)
    expected = plain_net(3).means
    results = together(losses, expected)
    for step in range(3):
        assert sum(r[0][step] for r in results) / 2 == pytest.approx(results[0][1][step], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_several_backwards_are_reduced_once(rank, world, stage):
    numel = sum(p.numel() for p in make_net().parameters() if p.requires_grad)
    engine = make_engine(world, stage=stage)
    engine.core.reset_traffic()
    with engine.coalesce_grad_reduction():
        for micro in range(2):
            loss = loss_on(engine, 0, rank=2 * rank + micro, world=2 * world, extra=uses_extra(0))
            engine.backward(loss / 2)
    sent = engine.core.traffic()["elements"]
    engine.step()
    assert difference(whole_model(engine), plain_net(1).model) < 1e-6
    assert 0 < sent < (2.5 if stage == 0 else 1.5) * numel  # padding of small tensors included


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
@on_ranks(2)
def test_an_unused_parameter_can_be_an_error(rank, world, kind):
    engine = make_engine(world, ignore_unused_parameters=False)
    refused(kind, "never.weight.*ignore_unused_parameters", train_engine, engine, 1, rank, world)


@on_ranks(2)
def test_unknown_optimizers_need_consent(rank, world):
    def untested(allow):
        model = make_net()
        optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.01)
        engine_of(model, config(world, zero_optimization={"stage": 2}, zero_allow_untested_optimizer=allow), optimizer)

    refused(AssertionError, "zero_allow_untested_optimizer", untested, False)
    untested(True)


@on_ranks(2)
def test_a_model_without_an_optimizer_is_gathered_and_run(rank, world):
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20},
    }
    engine = engine_of(make_net(), made)
    assert type(engine.optimizer).__name__ == "DeepSpeedZeRoOffload"
    tokens = torch.arange(6).reshape(1, 6)
    engine.eval()
    with torch.no_grad():
        for _ in range(1 + 2 * rank):
            out = engine(tokens)
    assert all(p.numel() == 0 or p.ds_persist for p in engine.module.parameters())
    assert torch.equal(out, make_net()(tokens))


@pytest.mark.sample("values")
@pytest.mark.parametrize("init", [False, True], ids=["plain model", "MiCS_Init"])
@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks(4)
def test_mics_equals_plain_training(rank, world, size, init):
    zero = {"mics_shard_size": size, "reduce_bucket_size": 300}
    model = make_net()
    if init:
        made = config(world, 1, zero_optimization={"stage": 3, **zero})
        with deepspeed.zero.MiCS_Init(config_dict_or_path=made) as context:
            model = make_net()
        assert context.num_partitions == size
    engine = make_engine(world, model, **zero)
    assert engine.module.first.weight.ds_world_size == size
    losses, norms = train_engine(engine, 5, rank, world)
    found = whole_model(engine)
    reference = plain_net(5)
    assert norms == pytest.approx(reference.norms, rel=1e-5)
    with deepspeed.zero.GatheredParameters(engine.module.first.bias, modifier_rank=3):
        if rank == 3:
            engine.module.first.bias.data.fill_(7.0)
    assert bool((value_of(engine.module.first.bias) == 7).all())
    assert difference(found, reference.model) < 1e-6


@on_ranks(4)
def test_a_mics_size_that_does_not_fit_is_named(rank, world):
    refused(ValueError, "mics_shard_size 3 does not divide.*1, 2, 4", make_engine, world, mics_shard_size=3)


@pytest.mark.parametrize(
    "zero",
    [{}, {"stage3_prefetch_bucket_size": 0}, {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}],
    ids=["default", "no prefetch", "nothing kept"],
)
@on_ranks(2, env={"DS_PEER_MEMORY": "0"})
def test_ranks_without_shared_memory_agree_on_gathers(rank, world, zero):
    engine = make_engine(world, **zero)
    assert engine.core.gatherer.source == "scheduled collectives"
    losses, norms = train_engine(engine, 5, rank, world)
    found = whole_model(engine)
    engine.core.gatherer.drain()
    assert difference(found, plain_net(5).model) < 1e-6


def branches_of(rank):
    """Each rank uses a layer of its own beside a common one."""
    return Parts(
        lambda net, x: net.layers[1 + net.rank](net.layers[0](x)).sum(),
        layers=torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4)),
        rank=rank,
    )


@on_ranks(2, timeout=60, env={"DS_PEER_MEMORY": "0"})
def test_what_ranks_gather_together_does_not_depend_on_their_branches(rank, world):
    engine = make_engine(world, branches_of(rank), stage3_param_persistence_threshold=0)
    for _ in range(3):
        loss = engine(torch.ones(1, 8))
        for when in ("after forward", "after backward"):
            for param in engine.module.parameters():
                with deepspeed.zero.GatheredParameters(param):
                    assert param.numel() > 0, when
            deepspeed.comm.all_reduce(torch.ones(1))  # nobody serves gathers here
            if when == "after forward":
                engine.backward(loss)
        # Gathers that were started ahead and given up are not on their way any more.
        assert {int(param.ds_status.value) for param in engine.module.parameters()} == {2}
        engine.step()


@pytest.mark.parametrize("client", [False, True], ids=["AdamW of ours", "AdamW of torch"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_memory_formats_are_not_confused(rank, world, stage, client):
    conv = seeded(torch.nn.Conv2d, 3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(conv.parameters(), lr=0.1) if client else None
    engine = engine_of(conv, settings(stage, rate=0.1, gradient_clipping=0.0), optimizer)
    torch.manual_seed(rank)
    engine.backward(engine(torch.randn(2, 3, 5, 5)).square().sum())
    grad = deepspeed.utils.safe_get_full_grad(conv.weight)
    engine.step()
    state = deepspeed.utils.safe_get_full_optimizer_state(conv.weight, "exp_avg")
    assert float((state - 0.1 * grad).abs().max() / grad.abs().max()) < 1e-6


class InitialisesChildren(torch.nn.Module):
    """As many models do: a constructor that writes into modules that are complete."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        for index, layer in enumerate(self.layers):
            torch.nn.init.constant_(layer.weight, index + 1.0)
            torch.nn.init.normal_(layer.bias)


@on_ranks(2)
def test_constructors_may_initialise_sharded_children(rank, world):
    torch.manual_seed(rank)
    with deepspeed.zero.Init(dtype=torch.float32):
        model = InitialisesChildren()
    refused(
        RuntimeError,
        "layers.1.weight|Linear.weight.*GatheredParameters",
        torch.nn.init.constant_,
        model.layers[1].weight,
        5.0,
    )  # outside it is an error again
    found = whole(model)
    assert bool((found["layers.0.weight"] == 1).all()) and bool((found["layers.1.weight"] == 2).all())
    first, second = together(found["layers.0.bias"].tolist())
    assert first == second and any(first)


@pytest.mark.parametrize("world", [1, 4])
@on_ranks(init=True)
def test_a_group_that_misses_ranks_is_named(rank, world):
    deepspeed.zero.Init()
    os.environ["WORLD_SIZE"] = "4"
    deepspeed.zero.Init(data_parallel_group=deepspeed.comm.get_world_group())
    if world == 1:
        refused(RuntimeError, "WORLD_SIZE says that 4 ranks", deepspeed.zero.Init)
        del os.environ["WORLD_SIZE"]
    deepspeed.zero.Init()
