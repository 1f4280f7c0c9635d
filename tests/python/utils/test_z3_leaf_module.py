"""Flags on the modules that ZeRO stage 3 gathers as one unit."""

import copy
import pickle
import types

import pytest
import torch

from deepspeed.config import DeepSpeedConfig
from deepspeed.log import logger
from deepspeed.utils import (
    apply_z3_leaf_module_config,
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from processes import run_after_torch
from refusals import refused


@pytest.mark.parametrize("first", ["deepspeed.utils", "deepspeed.utils.z3_leaf_module"])
def test_the_name_means_the_function_whatever_is_imported_first(first):
    code = f"import {first}\nfrom deepspeed.utils import z3_leaf_module\nassert callable(z3_leaf_module)"
    assert run_after_torch(code).returncode == 0


class Moe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))


class WideMoe(Moe):
    pass


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = (torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(2), "moe": kind()}) for kind in (Moe, WideMoe))
        self.layers = torch.nn.ModuleList(layers)
        self.out = torch.nn.Linear(2, 2)


def same(found, expected):
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected))


@pytest.fixture
def model():
    return Model()


def test_nothing_is_a_leaf_at_first(model):
    assert get_z3_leaf_modules(model) == [] and not z3_leaf_module(model) and not z3_leaf_parameter(model.out.weight)


def test_a_class_finds_its_subclasses_and_a_name_does_not(model):
    moes = [layer.moe for layer in model.layers]
    assert same(set_z3_leaf_modules(model, [Moe]), moes) and same(get_z3_leaf_modules(model), moes)
    assert all(z3_leaf_module(moe) for moe in moes) and not z3_leaf_module(model.layers[0])
    assert same(unset_z3_leaf_modules(model, ["Moe"]), moes[:1]) and same(get_z3_leaf_modules(model), moes[1:])
    assert same(unset_z3_leaf_modules(model, [f"{__name__}.WideMoe"]), moes[1:]) and get_z3_leaf_modules(model) == []


def test_one_class_needs_no_list_and_the_root_counts(model):
    assert same(set_z3_leaf_modules(model, Model), [model])
    assert same(set_z3_leaf_modules(model, "WideMoe"), [model.layers[1].moe])


def test_names_and_suffixes(model):
    first, second = (layer.moe for layer in model.layers)
    found, missing = set_z3_leaf_modules_by_name(model, ["layers.1.moe", "out"])
    assert same(found, [second, model.out]) and missing == []
    set_z3_leaf_modules_by_name(model, ["out"], flag=False)
    assert same(get_z3_leaf_modules(model), [second])
    found, missing = set_z3_leaf_modules_by_suffix(model, [".moe"])
    assert same(found, [first, second]) and missing == []
    set_z3_leaf_modules_by_suffix(model, ["moe"], flag=False)
    assert get_z3_leaf_modules(model) == []


@pytest.mark.parametrize("function", [set_z3_leaf_modules, unset_z3_leaf_modules])
def test_classes_that_are_not_there(model, function):
    refused(
        ValueError,
        "no module of Model is of the classes .*NoSuchBlock.* it has modules of .*Moe",
        function,
        model,
        ["NoSuchBlock", torch.nn.Conv1d],
    )
    assert function(model, ["NoSuchBlock"], raise_if_not_found=False) == []


@pytest.mark.parametrize("function", [set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix])
def test_names_that_are_not_there(model, function):
    refused(ValueError, "no module of Model has .*'moee'", function, model, ["out", "moee"])
    assert get_z3_leaf_modules(model) == [], "an error flags nothing"
    found, missing = function(model, ["out", "moee"], raise_if_not_found=False)
    assert same(found, [model.out]) and missing == ["moee"]


@pytest.mark.parametrize("item", [3, int, torch.nn.Linear(1, 1)])
def test_what_is_no_class(model, item):
    refused(TypeError, "a class of modules or its name", set_z3_leaf_modules, model, [item])


def test_parameters_know_it(model):
    moe = model.layers[0].moe
    inside, outside = moe.experts[0].weight, model.out.weight
    set_z3_leaf_module(moe, True)
    set_z3_leaf_module(moe, True)
    set_z3_leaf_module(moe.experts[0], True)
    assert z3_leaf_parameter(inside) and not z3_leaf_parameter(outside)
    set_z3_leaf_module(moe, False)
    assert z3_leaf_parameter(inside), "the expert itself is still one"
    assert not z3_leaf_parameter(moe.experts[1].weight)
    set_z3_leaf_module(moe.experts[0], False)
    assert not z3_leaf_parameter(inside)


def test_flags_survive_copies_and_pickles(model):
    set_z3_leaf_modules(model, ["Moe"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(get_z3_leaf_modules(other), [other.layers[0].moe])
        unset_z3_leaf_modules(other, [Moe])
        assert not z3_leaf_parameter(other.layers[0].moe.experts[0].weight)


def section(**keys):
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0, "leaf_module": keys}}
    return DeepSpeedConfig(config).zero_config.leaf_module


def test_config_section(model, monkeypatch):
    warnings = []
    monkeypatch.setattr(logger, "warning", warnings.append)
    leaf = types.SimpleNamespace(
        classes=["WideMoe", "NotHere"], names=["out", "layers.1.moe", "nowhere"], name_suffixes=["norm"]
    )
    found = apply_z3_leaf_module_config(model, leaf)
    assert same(found, [model.layers[1].moe, model.out, *(layer.norm for layer in model.layers)])
    assert {id(m) for m in get_z3_leaf_modules(model)} == {id(m) for m in found}
    assert len(warnings) == 1 and "zero_optimization.leaf_module.names" in warnings[0] and "'nowhere'" in warnings[0]


def test_default_config_section_flags_nothing_of_a_plain_model(model):
    assert apply_z3_leaf_module_config(model, section()) == []
