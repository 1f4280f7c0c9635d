"""Layers before they are built, and how they are dealt to parts."""

import time
from unittest import mock

import pytest
import torch
from torch import nn

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe.layers import as_layers, class_name, count_parameters, describe
from deepspeed.pipe.partitioning import partition
from deepspeed.pipe.profile import profile_layers
from refusals import refused


class Counted(nn.Module):
    built = 0

    def __init__(self, width):
        super().__init__()
        type(self).built += 1
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x):
        return x @ self.weight


def twice(x):
    return x * 2


def test_specs():
    spec = LayerSpec(nn.Linear, 4, 2, bias=False)
    assert repr(spec) == "Linear(4, 2, bias=False)" and class_name(spec) == "Linear"
    made = spec.build(log=True)
    assert isinstance(made, nn.Linear) and made.bias is None and spec.build() is not made
    tied = TiedLayerSpec("embed", nn.Embedding, 7, 3, tied_weight_attr="weight", forward_fn=twice)
    assert (tied.key, tied.tied_weight_attr, tied.forward_fn) == ("embed", ["weight"], twice)
    assert tied.build().weight.shape == (7, 3)
    refused(RuntimeError, "LayerSpec builds torch.nn.Module classes, not <function twice", LayerSpec, twice)


def test_what_layers_are():
    assert [class_name(layer) for layer in as_layers(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))] == ["ReLU", "Linear"]
    assert describe(3, twice) == "layer 3 (twice)"
    refused(TypeError, "layer 1 of the pipeline is 7: layers are modules, LayerSpec", as_layers, [nn.ReLU(), 7])
    refused(TypeError, "layer 0 of the pipeline is <class 'torch.nn.modules.activation.ReLU'>", as_layers, [nn.ReLU])


def test_parameters_are_counted_without_memory_and_without_random_numbers():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    assert count_parameters(LayerSpec(nn.Linear, 1 << 16, 1 << 16)) == (1 << 32) + (1 << 16)  # 16 GB
    assert torch.equal(torch.random.get_rng_state(), before)
    frozen = nn.Linear(3, 3)
    frozen.bias.requires_grad = False
    assert count_parameters(frozen) == 9 and count_parameters(twice) == 0


WIDTHS = [LayerSpec(Counted, width) for width in (4, 4, 4, 4, 9)]


_no_profile = mock.Mock(side_effect=AssertionError("nobody asked"))


def test_methods():
    def cut(method, parts=2, layers=WIDTHS, measure=_no_profile):
        return partition(layers, parts, method, measure, lambda: list(map(count_parameters, layers)))

    assert cut("uniform") == [0, 3, 5] and cut("Uniform", 5) == [0, 1, 2, 3, 4, 5]
    assert cut("parameters") == [0, 4, 5]  # 64 against 81
    mixed = [twice, LayerSpec(nn.Linear, 1, 1), twice, twice, LayerSpec(nn.Linear, 1, 1), LayerSpec(nn.ReLU)]
    bounds = cut("type:LINEAR", layers=mixed)
    assert bounds[0] == 0 and bounds[-1] == 6 and 2 <= bounds[1] <= 4
    assert cut([0, 1, 5]) == [0, 1, 5] and cut("profile", measure=lambda: [5.0, 1.0, 1.0, 1.0, 2.0]) == [0, 1, 5]


@pytest.mark.parametrize(
    "method, parts, text",
    [
        ("best", 2, "partition_method 'best' is unknown: use uniform, parameters, type:REGEX, profile, or a list"),
        ("type:conv", 2, "'type:conv' matches no layer: the classes are Counted"),
        ("type:(", 2, "has no regular expression"),
        ("uniform", 6, r"6 parts of the pipeline \(stages x virtual_stages\) for 5 layers: each part needs a layer"),
        ([0, 2], 2, "2 parts of 5 layers have 3 rising bounds from 0 to 5"),
        ([0, 3, 3], 2, "rising bounds"),
        ([1, 3, 5], 2, "rising bounds"),
    ],
)
def test_bad_methods(method, parts, text):
    refused(ValueError, text, partition, WIDTHS, parts, method, _no_profile, _no_profile)


def test_profile():
    class Slow(Counted):
        def forward(self, x):
            time.sleep(0.02)
            for _ in range(40):
                x = torch.tanh(x @ self.weight)
            return x

    norm = nn.BatchNorm1d(64)
    layers = [LayerSpec(Counted, 64), norm, LayerSpec(Slow, 64), twice]
    before = Counted.built
    costs = profile_layers(layers, torch.ones(8, 64))
    assert (Counted.built, Slow.built) == (before + 1, before + 2)  # Slow counts on from there: each once
    assert int(norm.num_batches_tracked) == 0 and norm.weight.grad is None
    assert costs[2].forward >= 0.02 and costs[2].activation_bytes > 40 * 8 * 64 * 4
    assert all(cost.seconds > 0 for cost in costs) and costs[0].activation_bytes == 8 * 64 * 4
    assert [cost.output_bytes for cost in costs] == [8 * 64 * 4] * 4
    refused(
        RuntimeError,
        r"profile_input does not go through layer 1 \(Linear\) of the pipeline: ",
        profile_layers,
        [nn.Linear(2, 3), nn.Linear(2, 3)],
        torch.ones(1, 2),
    )
