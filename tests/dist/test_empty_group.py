"""A parameter group without parameters: transformers' second group (no decay) when a LoRA trains matrices only."""

import pytest
import torch

from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from engine_models import square_losses
from harness import run_ranks
from models import two_layers
from runs import KEEP_GATHERED, engine_of, load_into, settings


def make(stage, order, config_optimizer=False):
    model = two_layers(seed=3)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    made = settings(stage, zero=KEEP_GATHERED, gradient_clipping=0.5)
    if config_optimizer:
        return engine_of(model, made, model_parameters=groups[::order])
    optimizer = torch.optim.AdamW(groups[::order], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return engine_of(model, made, optimizer, lr_scheduler=scheduler)


def resumes(rank, world, folder, stage, order, config_optimizer):
    engine = make(stage, order, config_optimizer)
    assert sorted(len(group["params"]) for group in engine.optimizer.param_groups)[0] == 0 or stage == 0
    square_losses(engine, rank, 2)
    engine.save_checkpoint(folder)
    expected = square_losses(engine, rank, 2)
    assert square_losses(load_into(make(stage, order, config_optimizer), folder), rank, 2) == expected
    if stage:
        whole = get_fp32_state_dict_from_zero_checkpoint(folder)
        assert {name: tuple(value.shape) for name, value in whole.items()} == {
            "0.weight": (5, 6), "0.bias": (5,), "2.weight": (3, 5), "2.bias": (3,),
        }  # fmt: skip
    return expected


@pytest.mark.sample("values")
@pytest.mark.parametrize("config_optimizer", [False, True], ids=["torch", "ours"])
@pytest.mark.parametrize("order", [1, -1], ids=["behind", "before"])
def test_saved_and_loaded(tmp_path, order, config_optimizer):
    found = [
        run_ranks(2, resumes, str(tmp_path / str(stage)), stage, order, config_optimizer, init=True)
        for stage in range(4)
    ]
    assert all(losses == pytest.approx(found[0][rank], abs=1e-6) for part in found for rank, losses in enumerate(part))
