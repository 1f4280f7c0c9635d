"""Adam8bit: trains like Adam, keeps a quarter of its states, and its checkpoints keep the bytes."""

import pickle

import pytest
import torch

from deepspeed.ops.adam import Adam8bit, FusedAdam
from native_classes import make_params, resumed, run
from refusals import refused

SHAPES = ((70, 70), (5000,), (10,), (0,), (3, 41, 41))


def trained(cls, dtype=torch.float32, steps=300):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64)).to(dtype)
    optimizer = cls(model.parameters(), lr=3e-3, weight_decay=0.01)
    x = torch.randn(128, 64).to(dtype)
    target = torch.tanh(x @ (torch.randn(64, 64) / 8).to(dtype))
    for _ in range(steps):
        loss = (model(x) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item(), optimizer


def test_trains_like_adam():
    (ours, _), (exact, _) = trained(Adam8bit), trained(FusedAdam)
    start, _ = trained(FusedAdam, steps=1)
    assert exact < 0.05 * start and ours < exact + 0.02 * start


def test_states_are_small_and_small_tensors_are_exact():
    params, expected = make_params(shapes=SHAPES), make_params(shapes=SHAPES)
    optimizer, reference = Adam8bit(params), FusedAdam(expected)
    run(optimizer, params, 3)
    run(reference, expected, 3)
    for p, q in zip(params, expected):
        state = optimizer.state[p]
        if p.numel() < 4096:
            assert torch.equal(p, q) and state["exp_avg"].dtype == torch.float32 and "exp_avg_max" not in state
            continue
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.uint8
        assert state["exp_avg"].shape == p.shape and state["exp_avg_max"].shape == (-(-p.numel() // 256),)
        held = sum(value.numel() * value.element_size() for value in state.values() if torch.is_tensor(value))
        assert held < 0.26 * 8 * p.numel()
        assert float((p - q).abs().max()) < 3e-3  # three steps of 1e-3


def test_min_size_and_layout():
    params = make_params(shapes=((100,),))
    optimizer = Adam8bit(params, min_8bit_size=50)
    run(optimizer, params, 1)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.uint8
    image = torch.nn.Parameter(torch.randn(8, 8, 16, 16).to(memory_format=torch.channels_last))
    optimizer = Adam8bit([image])
    run(optimizer, [image], 1)
    assert optimizer.state[image]["exp_avg"].dtype == torch.float32
    refused(ValueError, "min_8bit_size must be at least 1", Adam8bit, params, min_8bit_size=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_state_dict_round_trip(dtype):
    params = make_params(dtype, shapes=SHAPES)
    assert all(torch.equal(p, q) for p, q in zip(params, resumed(Adam8bit, params)))


def test_pickle():
    params = make_params(shapes=SHAPES)
    optimizer = Adam8bit(params)
    run(optimizer, params, 2)
    other = pickle.loads(pickle.dumps(optimizer))
    others = other.param_groups[0]["params"]
    run(optimizer, params, 2, first=2)
    run(other, others, 2, first=2)
    assert all(torch.equal(p, q) for p, q in zip(params, others))


def test_a_state_of_another_parameter_is_refused():
    params = make_params(shapes=((70, 70),))
    optimizer = Adam8bit(params)
    run(optimizer, params, 1)
    optimizer.state[params[0]]["exp_avg_max"] = torch.zeros(3)
    refused(ValueError, "Adam8bit: state 'exp_avg_max' of a parameter of shape .70, 70.", optimizer.step)
