"""A model that moves to a device keeps its parameters, also where torch makes new ones (as for the meta device)."""

import pytest
import torch

from deepspeed.zero.gathers.model import move_module

META = torch.device("meta")


def tied():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.allreduce = False
    return model


@pytest.mark.skipif(
    not hasattr(torch.__future__, "set_swap_module_params_on_conversion"), reason="torch can change no parameter's type"
)
def test_parameters_stay_the_same_objects():
    model = tied()
    before = dict(model.named_parameters())
    move_module(model, META)
    assert dict(model.named_parameters()).keys() == before.keys() == {"0.weight", "0.bias"}
    assert model[1].weight is model[0].weight is before["0.weight"]
    assert model[0].weight.is_meta and model[0].weight.allreduce is False
    assert not torch.__future__.get_swap_module_params_on_conversion()


@pytest.mark.skipif(
    hasattr(torch.__future__, "set_swap_module_params_on_conversion"), reason="torch can change a parameter's type"
)
def test_older_torch_refuses_to_separate_tied_weights():
    with pytest.raises(RuntimeError, match="makes new parameters when a model moves to meta"):
        move_module(tied(), META)


def test_devices_of_the_same_kind_of_tensor_move_in_place():
    model = tied()
    weight = model[0].weight
    move_module(model, torch.device("cpu"))
    assert model[1].weight is model[0].weight is weight
