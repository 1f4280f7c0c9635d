"""Adagrad against the paper's formula in fp64 and against torch, sparse gradients, and the contract's signature."""

import functools

import pytest
import torch

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad, FusedAdagrad, cpu_adagrad
from native_classes import assert_formula, make_params, positional_defaults, train_alike

CLASSES = pytest.mark.parametrize("cls", [DeepSpeedCPUAdagrad, FusedAdagrad])


def adagrad(lr, eps, weight_decay):
    """Duchi, Hazan & Singer 2011, the diagonal form."""

    def formula(weight, grad, state, step):
        grad = grad + weight_decay * weight
        state["sum"] = state.get("sum", torch.zeros_like(weight)) + grad * grad
        return weight - lr * grad / (state["sum"].sqrt() + eps)

    return formula


@pytest.mark.sample("values")
@CLASSES
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_paper(cls, weight_decay):
    make = functools.partial(cls, lr=0.02, eps=1e-9, weight_decay=weight_decay)
    assert_formula(make, adagrad(0.02, 1e-9, weight_decay))


@CLASSES
def test_equals_torch(cls):
    params, expected = make_params(), make_params()
    optimizer, reference = cls(params, lr=0.01), torch.optim.Adagrad(expected, lr=0.01)
    train_alike(optimizer, params, reference, expected, [None] * 20)


@CLASSES
def test_sparse_gradients_update_their_rows(cls):
    ours, theirs = (torch.nn.EmbeddingBag(20, 5, mode="sum", sparse=True) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer, reference = cls(ours.parameters(), lr=0.1), torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    for step in range(4):
        rows = torch.tensor([[1, 3, 3], [step, 7, 19]])
        for model, one in ((ours, optimizer), (theirs, reference)):
            one.zero_grad()
            model(rows).square().sum().backward()
            assert model.weight.grad.is_sparse
            one.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=2e-6, atol=2e-6)
    assert float(optimizer.state[ours.weight]["exp_avg_sq"][11].sum()) == 0
    with pytest.raises(RuntimeError, match="weight_decay decays every row"):
        one = cls(ours.parameters(), weight_decay=0.1)
        ours(rows).sum().backward()
        one.step()


def test_contract():
    assert cpu_adagrad.DeepSpeedCPUAdagrad is DeepSpeedCPUAdagrad
    assert positional_defaults(DeepSpeedCPUAdagrad) == [
        ("lr", 0.01), ("eps", 1e-10), ("weight_decay", 0), ("amsgrad", False), ("fp32_optimizer_states", True)
    ]  # fmt: skip
