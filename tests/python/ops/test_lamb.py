"""FusedLamb against the published arithmetic in fp64 loops, over dtypes, layouts and options; its contract."""

import functools
import inspect
import math
import pickle

import pytest
import torch

import native_classes
from deepspeed.ops.lamb import FusedLamb
from native_classes import run, set_grads, with_gradient
from refusals import refused

SHAPES = [(1,), (7,), (33, 5), (4, 3, 2, 2), (200, 170), (0,), (3, 0)]
HALF = [torch.bfloat16, torch.float16]


make_params = functools.partial(native_classes.make_params, shapes=SHAPES)


class Oracle:
    """LAMB as the published FusedLamb computes it, in fp64: the direction has raw moments, and bias correction is a
    factor of the rate, outside the trust ratio."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, inside=False, correct=True, low=0.01,
                 high=10.0):  # fmt: skip
        self.weights = [p.detach().double().clone() for p in params]
        self.m = [torch.zeros_like(w) for w in self.weights]
        self.v = [torch.zeros_like(w) for w in self.weights]
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, weight_decay
        self.inside, self.correct = inside, correct
        self.low, self.high, self.count, self.ratios = low, high, 0, []

    def step(self, grads):
        self.count += 1
        self.ratios = []
        beta1, beta2 = self.betas
        c1, c2 = (1 - beta1**self.count, 1 - beta2**self.count) if self.correct else (1, 1)
        for i, (w, g) in enumerate(zip(self.weights, grads)):
            self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * g * g
            root = (self.v[i] + self.eps).sqrt() if self.inside else self.v[i].sqrt() + self.eps
            update = self.m[i] / root + self.decay * w
            ratio = 1.0
            if w.norm() > 0 and update.norm() > 0:
                ratio = float((w.norm() / update.norm()).clamp(self.low, self.high))
            self.ratios.append(ratio)
            w -= self.lr * c2**0.5 / c1 * ratio * update


def compare(params, oracle, tolerance):
    for p, w in zip(params, oracle.weights, strict=True):
        assert p.numel() == 0 or float((p.detach().double() - w).norm() / w.norm()) < tolerance


def alike(optimizer, params, oracle, steps):
    """Steps of both with the same gradients."""
    for step in range(steps):
        run(optimizer, params, 1, first=step)
        oracle.step([p.grad.double() for p in params])
        assert optimizer.get_lamb_coeffs() == pytest.approx(oracle.ratios, rel=1e-5)


def test_signature_of_the_contract():
    assert str(inspect.signature(FusedLamb.__init__)) == (
        "(self, params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, eps_inside_sqrt=False, "
        "weight_decay=0.0, max_grad_norm=0.0, max_coeff=10.0, min_coeff=0.01, amsgrad=False)"
    )
    assert str(inspect.signature(FusedLamb.step)) == (
        "(self, closure=None, grads=None, output_params=None, scale=1.0, grad_norms=None)"
    )
    assert issubclass(FusedLamb, torch.optim.Optimizer)


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fifty_steps_equal_fp64(correct, inside, weight_decay):
    params = make_params()
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    oracle = Oracle(params, inside=inside, correct=correct, **options)
    alike(FusedLamb(params, bias_correction=correct, eps_inside_sqrt=inside, **options), params, oracle, 50)
    compare(params, oracle, 1e-6)


def test_twelve_steps_equal_plain_loops_over_numbers():
    """The published formula once more, element by element in Python's own numbers. Corrected moments in the direction
    give weights that differ by 3e-2 here."""
    lr, beta1, beta2, eps, decay, shape = 0.05, 0.9, 0.999, 1e-8, 0.01, (3, 4)
    generator = torch.Generator().manual_seed(3)
    param = torch.nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = FusedLamb([param], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    p = param.detach().reshape(-1).tolist()
    m, v, u = [0.0] * 12, [0.0] * 12, [0.0] * 12
    for t in range(1, 13):
        param.grad = torch.randn(shape, generator=generator)
        for i, g in enumerate(param.grad.reshape(-1).tolist()):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            u[i] = m[i] / (math.sqrt(v[i]) + eps) + decay * p[i]
        ratio = math.sqrt(sum(x * x for x in p)) / math.sqrt(sum(x * x for x in u))
        ratio = min(max(ratio, 0.01), 10.0)
        rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        p = [x - rate * ratio * step for x, step in zip(p, u)]
        optimizer.step()
        assert optimizer.get_lamb_coeffs() == pytest.approx([ratio], rel=1e-5)
    assert param.detach().reshape(-1).tolist() == pytest.approx(p, rel=1e-5, abs=1e-6)


def test_ratios_are_clamped():
    params = [torch.nn.Parameter(torch.full((4,), value)) for value in (1e-6, 1e6, 0.0, 1.0)]
    optimizer = FusedLamb(params, lr=0.1, max_coeff=5.0, min_coeff=0.5)
    for p in params:
        p.grad = torch.ones(4)
    params[3].grad = None
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [0.5, 5.0, 1.0, 1.0]
    torch.testing.assert_close(params[2].detach(), torch.full((4,), -0.1))
    torch.testing.assert_close(params[3].detach(), torch.ones(4))


def test_a_zero_gradient_at_zero_moments_moves_nothing():
    p = with_gradient(torch.randn(5), torch.zeros(5))
    before, optimizer = p.detach().clone(), FusedLamb([p])
    optimizer.step()
    assert torch.equal(p.detach(), before) and optimizer.get_lamb_coeffs() == [1.0]


@pytest.mark.parametrize("dtype", HALF)
def test_16_bit_parameters_have_fp32_moments(dtype):
    params = make_params(dtype)
    optimizer, oracle = FusedLamb(params, lr=0.05), Oracle(params, lr=0.05)
    for step in range(10):
        oracle.weights = [p.detach().double().clone() for p in params]  # one step at a time: rounding accumulates
        run(optimizer, params, 1, first=step)
        oracle.step([p.grad.double() for p in params])
    compare(params, oracle, 2**-7 if dtype == torch.bfloat16 else 2**-10)
    assert all(optimizer.state[p]["exp_avg"].dtype == torch.float32 for p in params)


def test_parameters_in_any_memory_order():
    params = [torch.nn.Parameter(torch.randn(6, 4).t()), torch.nn.Parameter(torch.randn(2, 3, 4, 5))]
    params[1].data = params[1].data.contiguous(memory_format=torch.channels_last)
    oracle = Oracle(params, lr=0.01)
    alike(FusedLamb(params, lr=0.01), params, oracle, 3)
    compare(params, oracle, 1e-6)


def test_max_grad_norm_clips_each_group():
    groups = [make_params(shapes=[(5, 4), (3,)]), make_params(shapes=[(6,)], seed=1)]
    optimizer = FusedLamb([{"params": groups[0], "max_grad_norm": 0.5}, {"params": groups[1]}], lr=0.01)
    oracles = [Oracle(params, lr=0.01) for params in groups]
    for step in range(3):
        for params in groups:
            set_grads(params, step, scale=3.0)
        grads = [[p.grad.double() for p in params] for params in groups]
        norm = torch.stack([g.norm() for g in grads[0]]).norm()
        optimizer.step()
        oracles[0].step([g * min(1.0, 0.5 / (float(norm) + 1e-6)) for g in grads[0]])
        oracles[1].step(grads[1])
    for params, oracle in zip(groups, oracles):
        compare(params, oracle, 1e-6)


def test_a_step_of_old_callers():
    """Scaled gradients given as lists, 16-bit copies to write, known norms."""
    params, plain = make_params(shapes=[(5, 4), (3,)]), make_params(shapes=[(5, 4), (3,)])
    optimizer, expected = FusedLamb(params, lr=0.01, max_grad_norm=1.0), FusedLamb(plain, lr=0.01)
    set_grads(plain, 0)
    norm = torch.stack([p.grad.norm() for p in plain]).norm()
    given = [(p.grad * 128).half() for p in plain]
    copies = [torch.empty_like(p, dtype=torch.float16) for p in params]
    optimizer.step(grads=given, output_params=copies, scale=128.0, grad_norms=[norm * 128])
    for p in plain:
        p.grad *= min(1.0, 1.0 / float(norm))
    expected.step()
    for p, q, copied in zip(params, plain, copies):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3)
        assert torch.equal(copied, p.detach().half())
    refused(ValueError, "one tensor for each parameter", optimizer.step, grads=given[:1])


def test_closure_and_missing_gradients():
    params = make_params(shapes=[(3,), (4,)])
    before = [p.detach().clone() for p in params]
    optimizer = FusedLamb(params, lr=0.1)

    def closure():
        loss = (params[0] ** 2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == pytest.approx(float((before[0] ** 2).sum()))
    assert not torch.equal(params[0], before[0]) and torch.equal(params[1], before[1])
    assert params[1] not in optimizer.state


def test_pickles():
    params = make_params(shapes=[(3,)])
    optimizer = FusedLamb(params, lr=0.01)
    run(optimizer, params, 1)
    again = pickle.loads(pickle.dumps(optimizer))
    run(again, again.param_groups[0]["params"], 1)
    assert len(again.get_lamb_coeffs()) == 1


@pytest.mark.parametrize(
    "bad, word",
    [
        ({"lr": -1.0}, "lr"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"min_coeff": -0.1}, "min_coeff"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff"),
        ({"max_coeff": float("nan")}, "max_coeff"),
    ],
)
def test_bad_hyperparameters(bad, word):
    refused(ValueError, word, FusedLamb, make_params(shapes=[(2,)]), **bad)


def test_sparse_gradients_are_refused():
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = FusedLamb(table.parameters())
    table(torch.tensor([1])).sum().backward()
    refused(RuntimeError, "sparse", optimizer.step)
