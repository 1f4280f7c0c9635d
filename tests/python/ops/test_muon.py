"""Muon against its formula in fp64; parameter groups, flags and the contract."""

import inspect
import types

import pytest
import torch

import deepspeed
import native_classes
from deepspeed.ops.muon import MuonWithAuxAdam, set_optimizer_flags
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam as FromTheOldPath
from deepspeed.runtime.zero.muon.original_muon import muon_update
from native_classes import copies_of, run, set_grads, train_alike
from refusals import refused

SHAPES = [(8, 8), (6, 24), (24, 6), (1, 5), (5, 1), (4, 3, 3, 3), (0, 4), (4, 0)]


def make_params(shapes=SHAPES, dtype=torch.float32, seed=0):
    return native_classes.make_params(dtype, shapes, seed)


def orthogonalised(update, steps=5):
    """The quintic iteration on singular values, in fp64."""
    if update.numel() == 0:
        return update.double()
    x = update.double().reshape(update.shape[0], -1)
    u, s, vh = torch.linalg.svd(x / (x.norm() + 1e-7), full_matrices=False)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s @ vh).reshape(update.shape) * max(1.0, x.shape[0] / x.shape[1]) ** 0.5


def gap(found, expected):
    return float((found.detach().double() - expected).norm() / expected.norm()) if found.numel() else 0.0


def test_signature_of_the_contract():
    assert str(inspect.signature(muon_update)) == (
        "(grad, momentum, beta=0.95, ns_steps=5, nesterov=True, ns_method='gram', is_expert_group=False)"
    )
    assert str(inspect.signature(deepspeed.set_optimizer_flags)) == "(config_class, model)"
    assert FromTheOldPath is MuonWithAuxAdam and issubclass(MuonWithAuxAdam, torch.optim.Optimizer)


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_muon_update(shape, nesterov, method):
    generator = torch.Generator().manual_seed(0)
    grad, momentum = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    expected = 0.9 * momentum.double() + 0.1 * grad.double()
    goal = orthogonalised(0.1 * grad + 0.9 * expected if nesterov else expected)
    kept = grad.clone()
    found = muon_update(grad, momentum, beta=0.9, nesterov=nesterov, ns_method=method)
    assert found.shape == grad.shape and found.dtype == grad.dtype and torch.equal(grad, kept)
    torch.testing.assert_close(momentum, expected.float(), rtol=1e-6, atol=1e-6)
    assert gap(found, goal) < 1e-4


def test_muon_update_of_16_bit_and_of_experts():
    grad = torch.randn(3, 8, 16)
    found = muon_update(grad, torch.zeros_like(grad), is_expert_group=True)
    assert all(gap(found[expert], orthogonalised(grad[expert])) < 1e-4 for expert in range(3))
    assert gap(muon_update(grad, torch.zeros_like(grad)), orthogonalised(grad)) < 1e-4, "rows are the first dimension"
    narrow = muon_update(grad[0].bfloat16(), torch.zeros(8, 16))
    assert narrow.dtype == torch.bfloat16 and gap(narrow, orthogonalised(grad[0])) < 0.05


@pytest.mark.parametrize(
    "size, more, words",
    [
        ((2, 2), {"ns_method": "cubic"}, "ns_method.*gram, standard"),
        ((2,), {}, "at least 2 dimensions"),
        ((2, 2), {"is_expert_group": True}, "at least 3 dimensions for experts"),
    ],
)
def test_muon_update_refuses(size, more, words):
    refused(ValueError, words, muon_update, torch.ones(size), torch.ones(size), **more)


class Oracle:
    def __init__(self, params, lr, momentum=0.95, decay=0.0, nesterov=True, steps=5):
        self.weights = [p.detach().double().clone() for p in params]
        self.buffers = [torch.zeros_like(w) for w in self.weights]
        self.lr, self.beta, self.decay, self.nesterov, self.steps = lr, momentum, decay, nesterov, steps

    def step(self, grads):
        for i, (w, g) in enumerate(zip(self.weights, grads)):
            self.buffers[i] = self.beta * self.buffers[i] + (1 - self.beta) * g
            update = (1 - self.beta) * g + self.beta * self.buffers[i] if self.nesterov else self.buffers[i]
            w -= self.lr * (orthogonalised(update, self.steps) + self.decay * w)


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_equal_fp64(method, nesterov):
    params = make_params()
    options = {"weight_decay": 0.1, "nesterov": nesterov, "ns_method": method, "ns_steps": 4}
    optimizer, oracle = (
        MuonWithAuxAdam(params, lr=0.05, momentum=0.9, **options),
        Oracle(params, 0.05, 0.9, 0.1, nesterov, 4),
    )
    for step in range(20):
        run(optimizer, params, 1, first=step)
        oracle.step([p.grad.double() for p in params])
    for p, w, buffer in zip(params, oracle.weights, oracle.buffers):
        assert gap(p, w) < 1e-5 and gap(optimizer.state[p]["momentum_buffer"], buffer) < 1e-5


def test_everything_else_is_adams():
    params = make_params([(5,), (7, 3)])
    params[1].use_muon = False
    plain = copies_of(params)
    optimizer = MuonWithAuxAdam(params, adam_lr=0.01, lr=5.0, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    reference = torch.optim.AdamW(plain, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    train_alike(optimizer, params, reference, plain, [None] * 10)
    assert all(set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in params)


def test_groups_and_defaults():
    matrix, vector = make_params([(3, 4), (4,)])
    optimizer = MuonWithAuxAdam([matrix, vector])
    muon, adam = optimizer.param_groups
    assert muon["params"] == [matrix] and adam["params"] == [vector]
    assert {k: v for k, v in muon.items() if k != "params"} == {
        "use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "nesterov": True, "ns_steps": 5,
        "ns_method": "gram",
    }  # fmt: skip
    assert {k: v for k, v in adam.items() if k != "params"} == {
        "use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0,
    }  # fmt: skip
    both = [{"params": [matrix], "use_muon": True, "lr": 0.1}, {"params": [vector], "use_muon": False, "adam_lr": 0.2}]
    optimizer = MuonWithAuxAdam(both, muon_lr=0.3, weight_decay=0.4)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.1, 0.4), (0.2, 0.4)]
    optimizer.add_param_group({"params": make_params([(2, 2), (2,)], seed=1), "lr": 0.5})
    assert [(g["use_muon"], g["lr"], len(g["params"])) for g in optimizer.param_groups[2:]] == [
        (True, 0.5, 1),
        (False, 0.5, 1),
    ]


@pytest.mark.parametrize(
    "bad, error, word",
    [
        ({"lr": -1.0}, ValueError, "lr"),
        ({"momentum": 1.0}, ValueError, "momentum"),
        ({"ns_steps": 0}, ValueError, "ns_steps"),
        ({"ns_steps": 2.5}, ValueError, "ns_steps"),
        ({"ns_method": "fast"}, ValueError, "ns_method"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]"),
        ({"eps": -1.0}, ValueError, "eps"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay"),
        ({"beta": 0.9}, TypeError, "beta"),
    ],
)
def test_bad_hyperparameters(bad, error, word):
    refused(error, word, MuonWithAuxAdam, make_params([(2, 2), (2,)]), **bad)


def test_bad_groups():
    matrices = [{"params": make_params([(3,)]), "use_muon": True}]
    refused(ValueError, "matrices.*use_muon=False", MuonWithAuxAdam, matrices)
    refused(ValueError, "no parameters", MuonWithAuxAdam, [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters(dtype):
    params = make_params([(8, 16), (3,)], dtype)
    expected, optimizer = Oracle(params[:1], 0.02), MuonWithAuxAdam(params)
    run(optimizer, params, 1)
    expected.step([params[0].grad.double()])
    assert gap(params[0], expected.weights[0]) < 2**-8
    assert optimizer.state[params[0]]["momentum_buffer"].dtype == torch.float32


def test_memory_orders_and_missing_gradients():
    turned, conv, idle = make_params([(5, 9), (4, 3, 2, 2), (3, 3)])
    turned.data = turned.data.t().contiguous().t()
    conv.data = conv.data.contiguous(memory_format=torch.channels_last)
    oracle = Oracle([turned, conv], 0.02)
    before = idle.detach().clone()
    optimizer = MuonWithAuxAdam([turned, conv, idle])
    for step in range(3):
        set_grads([turned, conv], step)
        optimizer.step()
        oracle.step([turned.grad.double(), conv.grad.double()])
    assert gap(turned, oracle.weights[0]) < 1e-5 and gap(conv, oracle.weights[1]) < 1e-5
    assert torch.equal(idle, before)


def test_flags():
    def model():
        linear = torch.nn.Linear
        layers = {"embed_tokens": torch.nn.Embedding(4, 3), "layer": linear(3, 3), "other": linear(3, 3)}
        return torch.nn.ModuleDict({**layers, "lm_head": linear(3, 4)})

    flagged, untouched = model(), model()
    flagged["other"].weight.use_muon = False
    set_optimizer_flags(types.SimpleNamespace(optimizer_name="muon"), flagged)
    flags = {name: param.use_muon for name, param in flagged.named_parameters()}
    assert [name for name, flag in flags.items() if flag] == ["layer.weight"] and len(flags) == 7
    set_optimizer_flags(types.SimpleNamespace(optimizer_name="adamw"), untouched)
    assert not any(hasattr(param, "use_muon") for param in untouched.parameters())
