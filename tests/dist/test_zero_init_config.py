"""``zero.Init`` with the configuration of a trainer that has not filled in its blanks yet."""

import contextlib

import pytest
import torch

import deepspeed
from harness import on_ranks
from models import Parts, seeded
from refusals import refused
from runs import engine_of, take_step, together

contexts_of_devices = pytest.mark.skipif(
    not hasattr(torch.device("cpu"), "__enter__"), reason="this torch has no `with torch.device(...)`"
)
CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}


@pytest.mark.parametrize(
    "precision, dtype",
    [
        ({}, torch.float32),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bf16": {"enabled": "auto"}}, torch.float32),
    ],
)
@on_ranks(2, init=True)
def test_blanks(rank, world, precision, dtype):
    filled = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 4, "warmup_num_steps": 2}},
    }
    config = {**CONFIG, **precision}
    torch.manual_seed(rank)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Linear(6, 5)
    assert model.weight.ds_shape == (5, 6) and model.weight.numel() == 0 and model.weight.dtype == dtype
    engine = engine_of(model, {**config, **filled}, model_parameters=model.parameters())
    first, second = together(take_step(engine, engine(torch.ones(1, 6, dtype=dtype)).float().square().mean()))
    assert first == second


@on_ranks(2, init=True)
def test_mics(rank, world):
    zero = {"stage": 3, "mics_shard_size": 1, "reduce_bucket_size": "auto"}
    with deepspeed.zero.MiCS_Init(config_dict_or_path={**CONFIG, "zero_optimization": zero}) as context:
        torch.nn.Linear(3, 3)
    assert context.num_partitions == 1


def test_without_a_configuration_parameters_are_fp16():
    with deepspeed.zero.Init():
        model = torch.nn.Linear(3, 4)
    assert model.weight.dtype == model.weight.ds_tensor.dtype == torch.float16
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        assert torch.nn.Linear(3, 4).bias.dtype == torch.bfloat16
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        assert torch.nn.Linear(3, 4).bias.dtype == torch.float32
    whole = torch.nn.Linear(3, 4)
    deepspeed.zero.Init(module=whole)
    assert whole.weight.dtype == torch.float32, "a module that is passed keeps its dtype"


def on_meta(device):
    net = Parts(
        lambda net, x: net.tied(torch.tanh(net.first(x))),
        first=torch.nn.Linear(6, 6, device=device),
        tied=torch.nn.Linear(6, 6, device=device),
    )
    net.tied.weight = net.first.weight
    net.first.weight.mark = "kept"
    return net


@pytest.mark.parametrize(
    "how",
    [
        "argument",
        "whole module",
        pytest.param("context outside", marks=contexts_of_devices),
        pytest.param("context inside", marks=contexts_of_devices),
    ],
)
@on_ranks(2, init=True)
def test_parameters_made_on_the_meta_device(rank, world, how):
    contexts = [deepspeed.zero.Init(dtype=torch.float32)]
    if how != "argument":
        contexts.insert(0 if how == "context outside" else 1, torch.device("meta"))
    if how == "whole module":
        model = on_meta("meta")
        deepspeed.zero.Init(module=model)
    else:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            model = on_meta("meta" if how == "argument" else None)
    params = list(model.parameters())
    assert model.tied.weight is model.first.weight and len(params) == 3 and model.first.weight.mark == "kept"
    assert all(p.ds_tensor.device.type == "cpu" and float(p.ds_tensor.abs().sum()) == 0 for p in params)
    plain = seeded(on_meta, "cpu")
    model.load_state_dict(plain.state_dict())
    engine = engine_of(model, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    x = torch.ones(2, 6)
    assert torch.equal(engine(x), plain(x))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_left_on_the_meta_device_is_refused_by_name(stage):
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    model = torch.nn.Sequential(torch.nn.Linear(3, 4, device="meta"))
    refused(
        ValueError,
        r"parameter '0.weight' \(4, 3\) is on the meta device.*to_empty",
        deepspeed.initialize,
        model=model,
        config=config,
    )
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    model[0].running_mean = model[0].running_mean.to("meta")
    refused(ValueError, "buffer '0.running_mean'", deepspeed.initialize, model=model, config=config)
