"""Parameters whose values are elsewhere: what only copies or looks gives an empty tensor and one warning, nothing else
does."""

import copy
import io
import logging
import sys

import torch

import deepspeed
from engine_models import assert_like_sgd, square_losses
from harness import on_ranks
from logs import logged
from models import Parts, seeded
from refusals import refused
from runs import engine_of, together

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}

# The comments are what the user's lines would be; each runs on a parameter, on its .data and on a state dict's entry.
COPIES = [
    lambda t: t.clone(),
    lambda t: torch.clone(t),
    lambda t: torch.clone(input=t),
    lambda t: torch.detach(input=t),
    lambda t: t.detach().clone(),
    lambda t: t.to(torch.float16),
    lambda t: t.to("cpu", copy=True),
    lambda t: t.detach().cpu(),
    lambda t: t.double(),
    lambda t: t.bfloat16(),
    lambda t: t.half(),
    lambda t: t.type(torch.float64),
    lambda t: t.detach().contiguous(),
    lambda t: t.detach().view(torch.uint8),
    lambda t: t.detach().flatten(),
    lambda t: t.view(-1),
    lambda t: t.reshape([-1]),
    lambda t: copy.deepcopy(t.data),
]
LOOKS = [
    (lambda t: t.detach().numpy().shape, (0,)),
    (lambda t: t.detach().cpu().numpy().tobytes(), b""),
    (lambda t: t.tolist(), []),
    (lambda t: t.data_ptr(), 0),
    (lambda t: t.detach().numpy().tolist(), []),
]
COMPUTES = [
    lambda t: t + 1,
    lambda t: 2 * t,
    lambda t: t.sum(),
    lambda t: t.norm(),
    lambda t: torch.cat([t, t]),
    lambda t: torch.stack([t.detach()]),
    lambda t: t.detach().clone() + 1,
    lambda t: t.data.cpu() * 2,
    lambda t: t.detach().float().mean(),
    lambda t: torch.equal(t, t),
    lambda t: t.reshape(3, -1),
    lambda t: t.T,
    lambda t: t.data.T,
    lambda t: t.data.copy_(torch.ones(3, 4)),
    lambda t: t.data.zero_(),
    lambda t: t.clone().fill_(1.0),
    lambda t: torch.ones(3, 4).copy_(t),
]


@on_ranks(2, init=True)
def test_copies_and_looks_are_empty_and_computing_raises(rank, world):
    with deepspeed.zero.Init(dtype=torch.float32):
        layer = torch.nn.Linear(4, 3)
    for wanted in COPIES:
        for given in (layer.weight, layer.weight.data, layer.state_dict()["weight"]):
            got = wanted(given)
            assert isinstance(got, torch.Tensor) and got.shape == torch.Size([0])
    for look, answer in LOOKS:
        for given in (layer.weight, layer.weight.data, layer.state_dict()["weight"]):
            assert look(given) == answer
    for compute in COMPUTES:
        for given in (layer.weight, layer.weight.data, layer.state_dict()["weight"]):
            said = r"values of parameter 'Linear.weight' \(3, 4\) are not on this rank"
            refused(RuntimeError, said, compute, given)
    # Another tensor takes only what it needs to know.
    assert torch.ones(2).to(layer.weight.half()).dtype == torch.float16
    assert torch.ones(2, dtype=torch.int64).type_as(layer.weight).tolist() == [1.0, 1.0]
    assert layer.weight.type() == "torch.FloatTensor"


@on_ranks(2, init=True)
def test_one_warning_for_each_line(rank, world):
    with deepspeed.zero.Init(dtype=torch.float32):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    with logged(logging.WARNING) as quiet:
        state = model.state_dict()  # the names of a state dict are asked for more often than its values
        assert list(state)[0] == "0.weight" and model[0].weight.data.shape == (0,)
        assert model.to("cpu") is model and model[0].weight.to(torch.float32) is model[0].weight
    assert not quiet
    with logged(logging.WARNING) as heard:
        for _ in range(2):
            line, copies = sys._getframe().f_lineno, [param.clone() for param in model.parameters()]
    [text] = heard
    assert f"clone at {__file__}:{line} gives an empty tensor" in text
    assert f"'Linear.weight' (3, 4) are not on rank {rank}" in text and "GatheredParameters" in text
    with logged(logging.WARNING) as heard:
        copies += [param.detach().numpy() for param in model.parameters()]
    [text] = heard
    assert text.startswith("detach at ")
    with logged(logging.WARNING) as heard:
        looked = [value.data_ptr() for value in state.values()]
    [text] = heard
    assert text.startswith("data_ptr at ") and looked == [0] * 4


@on_ranks(2, init=True)
def test_addresses_while_a_model_is_built(rank, world):
    with deepspeed.zero.Init(dtype=torch.float32):
        first, second = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        assert first.weight.data_ptr() == second.weight.data_ptr() == 0  # not of memory gathered for the question
        assert first.weight.clone().shape == (3, 4)  # a constructor copies values


@on_ranks(2, init=True)
def test_saved_by_torch(rank, world):
    with deepspeed.zero.Init(dtype=torch.float32):
        layer = torch.nn.Linear(4, 3)
    all_given = (layer.weight, layer.state_dict(), {"copy": layer.weight.detach().half()})
    files = [io.BytesIO() for _ in all_given]
    with logged(logging.WARNING) as heard:
        for given, file in zip(all_given, files):
            torch.save(given, file)
            assert ["pickling at" in text for text in heard] == [True]  # of the first one
    for file in files:
        file.seek(0)
        loaded = torch.load(file)  # weights_only in torch 2: nothing of ours is in it
        for value in loaded.values() if isinstance(loaded, dict) else [loaded]:
            assert type(value) in (torch.Tensor, torch.nn.Parameter) and value.shape == (0,)
            value.add_(1) if not value.requires_grad else None
    with deepspeed.zero.GatheredParameters(layer.weight):
        file = io.BytesIO()
        torch.save({"weight": layer.weight}, file)
        file.seek(0)
        loaded = torch.load(file)["weight"]
        assert type(loaded) is torch.nn.Parameter and torch.equal(loaded, layer.weight)


def forward_borrower(net, x):
    hidden = torch.tanh(net.own(x))
    logits = hidden @ net.lent.weight.T + hidden @ net.lent.weight.clone().t()
    return logits + hidden @ net.lent.weight.detach().to(hidden.dtype).t()


def borrower():
    """Uses copies of a parameter of a module that is not called."""
    return Parts(
        forward_borrower,
        own=torch.nn.Linear(6, 5),
        lent=torch.nn.Linear(5, 7, bias=False),
    )


@on_ranks(2, init=True)
def test_copies_within_a_running_module_have_values(rank, world, folder):
    engine = engine_of(seeded(borrower, seed=4), CONFIG)
    losses = square_losses(engine, rank, 3)
    with logged(logging.WARNING) as quiet:  # what this library does by itself
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
    assert not [text for text in quiet if "empty tensor" in text]
    assert_like_sgd(seeded(borrower, seed=4), together(losses))
