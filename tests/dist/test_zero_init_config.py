"""``zero.Init`` with the configuration of a trainer that has not filled in its blanks yet."""

import pytest
import torch

import deepspeed
from harness import run_ranks

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}


def build(rank, world, precision, filled):
    config = {**CONFIG, **precision}
    torch.manual_seed(rank)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Linear(6, 5)
    dtype = str(model.weight.dtype)
    assert model.weight.ds_shape == (5, 6) and model.weight.numel() == 0
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={**config, **filled})[0]
    loss = engine(torch.ones(1, 6, dtype=model.weight.dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return dtype, float(loss)


@pytest.mark.parametrize(
    "precision, dtype",
    [
        ({}, "torch.float32"),
        ({"bf16": {"enabled": True}}, "torch.bfloat16"),
        ({"bf16": {"enabled": "auto"}}, "torch.float32"),
    ],
)
def test_blanks(precision, dtype):
    filled = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 4, "warmup_num_steps": 2}},
    }
    results = run_ranks(2, build, precision, filled, init=True)
    assert [dtype, dtype] == [found for found, _ in results]
    assert results[0] == results[1]


def mics(rank, world):
    zero = {"stage": 3, "mics_shard_size": 1, "reduce_bucket_size": "auto"}
    with deepspeed.zero.MiCS_Init(config_dict_or_path={**CONFIG, "zero_optimization": zero}) as context:
        torch.nn.Linear(3, 3)
    return context.num_partitions


def test_mics():
    assert run_ranks(2, mics, init=True) == [1, 1]
