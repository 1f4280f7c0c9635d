"""Models that share sequences are not called without positions, where torch lets hooks see keywords."""

import copy

import torch

from deepspeed._compat import forward_hooks_take_kwargs
from deepspeed.sequence import positions
from refusals import refused


class Model(torch.nn.Module):
    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return input_ids


def test_no_positions_are_an_error_while_ranks_share():
    model, shares, given = Model(), [True], torch.arange(3)[None]
    positions.demand(model, lambda module: shares[0])
    assert model(given, None, given) is given is model(given, position_ids=given)
    if forward_hooks_take_kwargs():
        for call in (lambda: model(given), lambda: model(given, position_ids=None)):
            refused(ValueError, "Model was called without position_ids", call)
    assert copy.deepcopy(model)(given) is given  # what is planned with a copy is not training
    shares[0] = False
    assert model(given) is given


def test_models_that_take_none_are_not_asked():
    model = torch.nn.Linear(2, 2)
    positions.demand(model, lambda module: True)
    assert model(torch.zeros(1, 2)).shape == (1, 2) and not model._forward_pre_hooks
