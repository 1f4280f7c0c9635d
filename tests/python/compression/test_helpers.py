"""Names of deepspeed.compression that clients import: helpers work, methods that are not built say so."""

import pytest
import torch

import deepspeed
from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.compression.helper import convert_conv1d_to_linear, recursive_getattr, recursive_setattr
from refusals import refused


class Conv1D(torch.nn.Module):
    """As in transformers: y = x W + b with W of shape [inputs, outputs]."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(inputs, outputs))
        self.bias = torch.nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


def test_modules_by_name():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.ReLU())
    assert (
        recursive_getattr(model, "0.0") is model[0][0] and recursive_getattr(model, "0.0.weight") is model[0][0].weight
    )
    other = torch.nn.Linear(2, 3)
    recursive_setattr(model, "0.0", other)
    recursive_setattr(model, "1", torch.nn.Identity())
    assert model[0][0] is other and isinstance(model[1], torch.nn.Identity)


@pytest.mark.parametrize("wrapped", [False, True])
def test_conv1d_becomes_linear(wrapped):
    model = torch.nn.Sequential(Conv1D(3, 5), torch.nn.Sequential(Conv1D(5, 2)))
    x = torch.randn(4, 3)
    before = model(x)
    outer = torch.nn.Module()
    outer.module = model
    made = convert_conv1d_to_linear(outer if wrapped else model, Conv1D)
    assert made is model and not any(isinstance(module, Conv1D) for module in made.modules())
    assert torch.allclose(made(x), before, atol=1e-6) and tuple(made[0].weight.shape) == (5, 3)


WANTED = {"weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {"a": {
    "params": {"start_bits": 8, "target_bits": 8}}}}}  # fmt: skip


@pytest.mark.parametrize("call", [init_compression, redundancy_clean])
def test_methods_that_are_not_built_are_named(call):
    model = torch.nn.Linear(2, 2)
    refused(deepspeed.DeepSpeedConfigError, "weight_quantization", call, model,
            {"train_batch_size": 1, "compression_training": WANTED})  # fmt: skip
    assert call(model, {"train_batch_size": 1}) is model
    off = {"weight_quantization": {"shared_parameters": {"enabled": False}}}
    assert call(model, {"train_batch_size": 1, "compression_training": off}) is model
