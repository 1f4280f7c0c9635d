"""All classes with a native rule: found, not listed, so that a new one is tested by what is here already."""

import copy
import importlib
import inspect
import pkgutil

import torch

from deepspeed import ops
from deepspeed.ops.cpu_optimizer import CPUOptimizer
from deepspeed.ops.native_optimizer import NativeOptimizer

SHARED = ("NativeOptimizer", "FusedOptimizer", "CPUOptimizer")


def native_classes():
    """The classes that packages of ``deepspeed.ops`` export, by name."""
    found = {}
    for module in pkgutil.iter_modules(ops.__path__):
        package = importlib.import_module(f"deepspeed.ops.{module.name}") if module.ispkg else None
        for name in getattr(package, "__all__", ()):
            cls = getattr(package, name)
            native = isinstance(cls, type) and issubclass(cls, NativeOptimizer) and name not in SHARED
            if native and not getattr(cls, "states_in_one_piece", False):  # test_adam8bit.py
                found[name] = cls
    return [found[name] for name in sorted(found)]


def is_cpu_class(cls):
    return issubclass(cls, CPUOptimizer)


def make_params(dtype=torch.float32, shapes=((1,), (7,), (33, 5), (4, 3, 2, 2), (100, 17), (0,)), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def train_alike(optimizer, params, reference, expected, before_step):
    """Steps of both with the same gradients, then the same parameters. ``before_step``: for each step a function of an
    optimizer, or None."""
    for step, prepare in enumerate(before_step):
        for one, own in ((optimizer, params), (reference, expected)):
            if prepare:
                prepare(one)
            set_grads(own, step)
            one.step()
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


def against_formula(optimizer, params, formula, steps):
    """Largest relative difference (2-norm over a parameter) to ``formula(weight, grad, state, step)`` in fp64 after
    ``steps`` steps with gradients that have a direction, and the parameters' own."""
    weights = [p.detach().double() for p in params]
    states = [{} for _ in params]
    for step in range(1, steps + 1):
        set_grads(params, step)
        for index, p in enumerate(params):
            p.grad += 0.3
            weights[index] = formula(weights[index], p.grad.double(), states[index], step)
        optimizer.step()
    pairs = [(p.detach().double(), weight) for p, weight in zip(params, weights) if p.numel()]
    return max(float((p - weight).norm() / weight.norm()) for p, weight in pairs)


def ulps_after_one_step(optimizer, params, formula):
    """Largest distance of a weight from ``formula`` in fp64, in units of the last place of the larger of the old and
    the new weight."""
    old = [p.detach().double() for p in params]
    set_grads(params, 1)
    exact = [formula(weight, p.grad.double(), {}, 1) for weight, p in zip(old, params)]
    optimizer.step()
    worst = 0.0
    for before, after, p in zip(old, exact, params):
        if p.numel():
            _, exponent = torch.frexp(torch.maximum(before.abs(), after.abs()))
            ulp = torch.ldexp(torch.ones_like(after), exponent - 24)
            worst = max(worst, float(((p.detach().double() - after).abs() / ulp).max()))
    return worst


def assert_formula(make, formula):
    """Optimizers that ``make(params)`` makes stay close to ``formula``, in one step and in 1,000."""
    for check, bound in ((ulps_after_one_step, 2), (lambda *args: against_formula(*args, 1000), 1e-6)):
        params = make_params(shapes=((257,), (33, 5), (3, 0)))
        assert check(make(params), params, formula) <= bound


def positional_defaults(cls):
    """Name and default of each parameter that can be given by its place, without that of the parameters to update."""
    parameters = list(inspect.signature(cls).parameters.values())
    return [(p.name, p.default) for p in parameters if p.kind is not p.KEYWORD_ONLY][1:]


def run(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


def copies_of(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def equal(params, others):
    return all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def on_threads(counts, train):
    """The results of ``train()`` under each number of threads."""
    before, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(train())
    finally:
        torch.set_num_threads(before)
    return results


def with_gradient(value, gradient=None):
    """A parameter and its gradient, which is all ones unless it is given."""
    p = torch.nn.Parameter(value)
    p.grad = torch.ones_like(p) if gradient is None else gradient
    return p


def resumed(cls, params):
    """Copies of ``params`` whose optimizer went on from the state of that of ``params``, which went on as well."""
    optimizer, others = cls(params, lr=0.01), copies_of(params)
    run(optimizer, params, 3)
    for p, q in zip(params, others):
        q.data.copy_(p.data)
    other = cls(others, lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group, saved in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert group["lr"] == saved["lr"]
        for p, q in zip(saved["params"], group["params"], strict=True):
            assert other.state[q]["step"] == 3 and other.state[q].keys() == optimizer.state[p].keys()
            for name, value in optimizer.state[p].items():
                if torch.is_tensor(value):
                    mine = other.state[q][name]
                    assert mine.dtype == value.dtype and torch.equal(mine, value)
                    assert mine.data_ptr() != value.data_ptr() or not value.numel()
    run(optimizer, params, 3, first=3)
    run(other, others, 3, first=3)
    return others
