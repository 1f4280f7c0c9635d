"""Promises of every class with a native rule: states, copies, checkpoints, dtypes, refusals. It finds the classes."""

import copy
import pickle

import pytest
import torch

from deepspeed.ops.fused_optimizer import FusedOptimizer
from deepspeed.ops.muon import MuonWithAuxAdam
from deepspeed.ops.native_optimizer import RULES
from native_classes import (
    copies_of,
    equal,
    is_cpu_class,
    make_params,
    native_classes,
    on_threads,
    resumed,
    run,
    set_grads,
    with_gradient,
)
from refusals import refused

ALL = native_classes()
CLASSES = pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)


def slots_by_param(optimizer):
    return {p: optimizer.slots_of(group) for group in optimizer.param_groups for p in group["params"]}


def test_the_known_ones_are_found():
    names = {cls.__name__ for cls in ALL}
    assert names >= {"FusedAdam", "DeepSpeedCPUAdam", "FusedAdagrad", "DeepSpeedCPUAdagrad", "FusedLion", "FusedSGD"}
    assert {rule for cls in ALL for rule in [cls.rule] if rule} <= set(RULES)


@CLASSES
def test_states_have_the_names_and_shapes_of_the_slots(cls):
    params = make_params()
    optimizer = cls(params)
    run(optimizer, params, 2)
    for p, slots in slots_by_param(optimizer).items():
        assert set(optimizer.state[p]) == {"step", *slots} and optimizer.state[p]["step"] == 2
        for slot in slots:
            assert optimizer.state[p][slot].shape == p.shape and optimizer.state[p][slot].dtype == torch.float32


@CLASSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_state_dict_round_trip(cls, dtype):
    params = make_params(dtype, shapes=((1,), (7,), (33, 5), (4, 3, 2, 2), (200, 170), (0,), (3, 0), (4, 6)))
    assert equal(params, resumed(cls, params))


@CLASSES
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_copies_are_independent(cls, duplicate):
    params = make_params()
    optimizer = cls(params)
    run(optimizer, params, 2)
    other = duplicate(optimizer)
    copied = dict(zip(slots_by_param(optimizer), slots_by_param(other), strict=True))
    others = [copied[p] for p in params]
    before = copies_of(params)
    run(other, others, 2, first=2)
    assert equal(params, before) and not equal(params, others)
    assert [one.state_dict()["state"][0]["step"] for one in (optimizer, other)] == [2, 4]
    run(optimizer, params, 2, first=2)
    assert equal(params, others)


@pytest.mark.sample("values")
@pytest.mark.parametrize("cls", [cls for cls in ALL if cls is not MuonWithAuxAdam], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}], ids=str)
def test_threads_change_nothing(cls, options):
    """Not Muon's: its matrix products are the BLAS library's, which adds up in another order on other threads."""

    def trained():
        params = make_params(shapes=((300, 301), (5,), (1000, 70), (70000,), (4, 3, 2, 2), (0,), (3, 0)))
        run(cls(params, lr=0.01, **options), params, 2)
        return params

    first, *others = on_threads((1, 2, 3, 5), trained)
    assert all(equal(first, other) for other in others)


@CLASSES
@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"lr": float("nan")}, {"weight_decay": -0.1}], ids=str)
def test_bad_hyperparameters(cls, bad):
    (name,) = bad
    refused(ValueError, f"{cls.__name__}: {name} must be at least 0", cls, make_params(), **bad)


@CLASSES
def test_other_dtypes_are_refused(cls):
    p = with_gradient(torch.zeros(4, dtype=torch.float64))
    refused(TypeError, f"{cls.__name__} works on fp32, fp16 and bf16", cls([p]).step)
    assert float(p.sum()) == 0


@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "FusedAdam", "DeepSpeedCPUAdagrad", "FusedAdagrad", "FusedLamb"])
def test_amsgrad_is_refused(name):
    cls = next(cls for cls in ALL if cls.__name__ == name)
    refused(RuntimeError, "AMSGrad", cls, make_params(), amsgrad=True)


@CLASSES
def test_special_values_spread_no_further_than_their_element(cls):
    plain, special = (make_params(shapes=((50, 3),)) for _ in range(2))
    set_grads(plain, 1)
    set_grads(special, 1)
    special[0].grad.view(-1)[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-45, 0.0])
    for params in (plain, special):
        cls(params, lr=0.1).step()
    if cls.__name__ in ("FusedAdam", "FusedLion", "FusedAdagrad", "FusedSGD"):
        assert torch.equal(plain[0].view(-1)[5:], special[0].view(-1)[5:])
        assert special[0].view(-1)[0].isnan() and special[0].view(-1)[3:5].isfinite().all()


@CLASSES
def test_closure(cls):
    params = make_params()
    optimizer = cls(params)

    def closure():
        assert torch.is_grad_enabled()
        set_grads(params, 1)
        return 7

    assert optimizer.step(closure) == 7 and optimizer.state[params[0]]["step"] == 1


CPU = [cls for cls in ALL if is_cpu_class(cls)]


@pytest.mark.parametrize("cls", CPU, ids=lambda cls: cls.__name__)
def test_cpu_classes(cls):
    first, second = cls(make_params()), cls(make_params())
    assert second.opt_id == first.opt_id + 1 == cls.optimizer_id - 1
    for dtype in (torch.bfloat16, torch.float16):
        params = make_params(dtype)
        optimizer = cls(params, fp32_optimizer_states=False)
        run(optimizer, params, 1)
        for p, slots in slots_by_param(optimizer).items():
            assert all(optimizer.state[p][slot].dtype == dtype for slot in slots)
    step = cls([with_gradient(torch.zeros(4, device="meta"))]).step
    refused(AssertionError, f"{cls.__name__} updates parameters in host memory.*offload_optimizer", step)


FUSED = [cls for cls in ALL if issubclass(cls, FusedOptimizer)]


@pytest.mark.parametrize("cls", FUSED, ids=lambda cls: cls.__name__)
def test_fused_classes_refuse_old_arguments(cls):
    params = make_params()
    optimizer = cls(params)
    for name in ("grads", "output_params", "scale", "grad_norms", "grad_scaler"):
        refused(RuntimeError, f"{cls.__name__}.step does not take {name}", optimizer.step, **{name: [1]})
    set_grads(params, 1)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


# ---- random rounding ---------------------------------------------------------------------------------------------

RANDOM = [cls for cls in ALL if cls.rule in ("adam", "adagrad", "lion", "sgd")]


@pytest.mark.parametrize("cls", RANDOM, ids=lambda cls: cls.__name__)
def test_random_rounding_keeps_small_updates(cls):
    def trained(random, dtype=torch.bfloat16):
        torch.manual_seed(3)
        params = [torch.nn.Parameter(torch.ones(4096, dtype=dtype))]
        optimizer = cls(params, lr=2e-5)
        optimizer.stochastic_rounding = random
        for _ in range(100):
            params[0].grad = torch.ones_like(params[0])
            optimizer.step()
        return params[0].detach()

    exact, nearest, random = trained(False, torch.float32), trained(False), trained(True)
    assert float(exact.mean()) < 1 - 1e-4
    assert float(nearest.float().mean()) == 1  # every update is less than half a unit of the last place
    assert abs(float(random.float().mean()) - float(exact.mean())) < 0.1 * (1 - float(exact.mean()))
    assert torch.equal(random, trained(True))  # by the same seed


@pytest.mark.parametrize("cls", RANDOM, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_random_rounding_leaves_other_dtypes_alone(cls, dtype):
    results = [make_params(dtype), make_params(dtype)]
    for random, params in enumerate(results):
        optimizer = cls(params)
        optimizer.stochastic_rounding = bool(random)
        run(optimizer, params, 3)
    assert equal(*results)


def test_random_rounding_differs_between_steps_and_parameters():
    params = [torch.nn.Parameter(torch.ones(512, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = next(cls for cls in ALL if cls.__name__ == "FusedSGD")(params, lr=1e-3)
    optimizer.stochastic_rounding = True
    seen = []
    for _ in range(2):
        for p in params:
            p.data.fill_(1)
            p.grad = torch.ones_like(p)
        optimizer.step()
        seen += [p.detach().clone() for p in params]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
