"""Wrong configurations are refused with the right advice, before any process group is made."""

import os

import pytest
import torch
from broken_configs import BROKEN

import deepspeed
from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
from refusals import refused


@pytest.mark.parametrize("name, config, words, world", BROKEN, ids=[item[0] for item in BROKEN])
def test_refused_with_the_right_suggestion(name, config, words, world):
    error = refused(DeepSpeedConfigError, "", DeepSpeedConfig, config, world_size=world)
    assert all(word in str(error) for word in words), error
    assert not torch.distributed.is_available() or not torch.distributed.is_initialized()


@pytest.mark.parametrize("name, config, words, world", BROKEN, ids=[item[0] for item in BROKEN])
def test_initialize_refuses_it_before_a_process_group_is_made(name, config, words, world, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # initialize() writes what the launcher left out
    for variable, value in {"RANK": 0, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr(torch.distributed, "init_process_group", None)  # calling it is another error than the one below
    refused(DeepSpeedConfigError, "", deepspeed.initialize, config=config, model=torch.nn.Linear(2, 2))


def test_there_are_at_least_60():
    assert len(BROKEN) >= 60 and len({name for name, *_ in BROKEN}) == len(BROKEN)


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": 7, "gradient_accumulation_steps": 2},
        {"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"train_batch_size": 8, "zero_optimization": {"stage": 4}},
        {"gradient_accumulation_steps": 2},
        {"train_batch_size": 0},
    ],
)
def test_the_contract_promises_an_assertion_error(config):
    refused(AssertionError, "", DeepSpeedConfig, config)


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": 8, "communication_data_type": "int4"},
        {"train_batch_size": 8, "gradient_allreduce_op": "max"},
        {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        {"train_batch_size": 8, "fp16": {"loss_scale": True}},
        "no/such/file.json",
        7,
    ],
)
def test_the_contract_promises_a_value_error(config):
    assert not isinstance(refused(ValueError, "", DeepSpeedConfig, config), AssertionError)


def test_all_errors_are_told_together():
    config = {"train_batch_size": 8, "gradient_clippin": 1, "fp16": {"loss_scal": 1}, "steps_per_print": "x"}
    text = str(refused(DeepSpeedConfigError, "", DeepSpeedConfig, config))
    assert "3 things are wrong" in text
    assert "gradient_clipping" in text and "loss_scale" in text and "steps_per_print" in text
