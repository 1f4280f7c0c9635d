"""Optimizers that the user has made: groups, states that are saved, and steps that raise."""

import itertools
import os
import pickle

import pytest
import torch

import deepspeed
import peer_model
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from harness import on_ranks
from models import two_layers
from refusals import refused
from runs import KEEP_GATHERED, dtype_of, engine_of, load_into, settings, sgd, take_step
from runs import weight_list as weights


def make_engine(stage, optimizer, dtype="fp32", seed=0, **more):
    net = two_layers(5, 4, seed=seed)
    return engine_of(net, settings(stage, dtype=dtype, zero=KEEP_GATHERED, **more), optimizer(list(net.parameters())))


def train(engine, steps, rank, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        take_step(engine, engine(torch.randn(2, 5, generator=generator).to(dtype_of(engine))).float().pow(2).mean())
    return engine


# ---- states --------------------------------------------------------------------------------------------------------
class Mixed(torch.optim.Optimizer):
    """``sum`` has a value for each element in one group, and is one number, another for each parameter, in the other;
    with ``mean`` it is the other way round. ``decay`` is a tensor of one element; ``seen`` is a number."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05, "full": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (one for one in group["params"] if one.grad is not None and one.numel()):
                state, full = self.state[param], group["full"]
                if not state:
                    state["sum"] = torch.zeros_like(param) if full else torch.tensor(0.0)
                    state["mean"] = torch.tensor(1.0) if full else torch.ones_like(param)
                    state["decay"], state["seen"] = torch.ones(1), 0
                state["sum"] += param.grad if full else group["lr"]
                state["mean"] *= 0.9 if full else 1 + param.grad.abs()
                state["decay"] *= 0.5
                state["seen"] += 1
                param.sub_(group["lr"] * (state["sum"] * state["mean"] + state["decay"] * param.grad) / state["seen"])


def mixed(params):
    return Mixed([{"params": params[::2]}, {"params": params[1::2], "full": False}])


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@on_ranks(2)
def test_states_that_differ_between_groups_and_parameters_are_saved(rank, world, folder, stage, dtype):
    engine = make_engine(stage, mixed, dtype)
    engine.module[2].bias.requires_grad_(False)  # of one group: it has seen fewer updates than the other
    train(engine, 1, rank)
    engine.module[2].bias.requires_grad_(True)
    train(engine, 2, rank, first=1)
    engine.save_checkpoint(folder)
    train(engine, 2, rank, first=3)
    other = train(load_into(make_engine(stage, mixed, dtype, seed=7), folder), 2, rank, first=3)
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), weights(other), strict=True)), (stage, dtype)


def keys_of(engine):
    return [sorted(group) for group in engine.basic_optimizer.state_dict()["param_groups"]]


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_groups_have_the_same_keys_before_a_save_and_after_a_load(rank, world, folder, stage):
    source = peer_model.folder(stage, "fp32")  # of another implementation, whose groups count steps
    for optimizer in (None, lambda groups: torch.optim.AdamW(groups, lr=0.01)):
        engine = peer_model.make_engine(peer_model.what(stage, "fp32")["config"], optimizer=optimizer)
        before = keys_of(engine)
        if optimizer is None:
            engine.load_checkpoint(source)
            assert keys_of(engine) == before, stage
        place = os.path.join(folder, f"{stage}{optimizer is None}")
        peer_model.train(engine, 1, rank)
        engine.save_checkpoint(place)
        other = load_into(peer_model.make_engine(peer_model.what(stage, "fp32")["config"], optimizer=optimizer), place)
        assert keys_of(other) == keys_of(engine) == before, stage


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_states_made_before_the_first_step_have_the_dtype_of_masters(rank, world, stage):
    engine = make_engine(stage, lambda params: torch.optim.Adagrad(params, lr=0.1), "bf16")
    before = weights(engine)
    train(engine, 1, rank)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(engine))), stage
    sums = [state["sum"] for state in engine.basic_optimizer.state.values()]
    assert sums and all(one.dtype == torch.float32 for one in sums), stage


# ---- groups --------------------------------------------------------------------------------------------------------
@on_ranks(1)
def test_another_group_is_refused_by_name_at_every_stage(rank, world):
    words = "add_param_group: the optimizer belongs to an engine.*Pass the group before deepspeed.initialize"
    for stage, dtype, make in itertools.product(range(4), ("fp32", "bf16"), (sgd, deepspeed.ops.adam.FusedAdam)):
        made = []

        def client(params, make=make, made=made):
            made.append(make(params))
            return made[0]

        engine = make_engine(stage, client, dtype)
        more = {"params": [torch.nn.Parameter(torch.ones(3))]}
        for optimizer in (engine.optimizer, engine.basic_optimizer, made[0]):
            refused(RuntimeError, words, optimizer.add_param_group, dict(more))
        train(engine, 1, rank)
        groups = engine.basic_optimizer.param_groups
        groups.append({**groups[0], **more})
        refused(RuntimeError, words, train, engine, 1, rank)
        groups.pop()
        engine.step()
        assert engine.global_steps == 2
        engine.destroy()
        for optimizer in (made[0], pickle.loads(pickle.dumps(made[0]))):  # of no engine any more
            optimizer.add_param_group(dict(more))
    alone = [torch.nn.Parameter(torch.ones(3))]
    refused(RuntimeError, words, DeepSpeedZeroOptimizer(sgd(alone), {}, None, {}).add_param_group, {"params": []})


# ---- steps that raise ----------------------------------------------------------------------------------------------
class Stubborn(torch.optim.SGD):
    failures = 0

    def step(self, closure=None):
        if self.failures:
            self.failures -= 1
            raise OSError("not now")
        return super().step(closure)


def end_of(stage, dtype, rank, failures):
    """Weights, norm and steps of a run whose last step fails so often before it is made."""
    clipped = {"gradient_clipping": 0.01, "gradient_accumulation_steps": 2}
    engine = train(make_engine(stage, lambda params: Stubborn(params, lr=0.5, momentum=0.9), dtype, **clipped), 3, rank)
    engine.basic_optimizer.failures = failures
    for attempt in range(failures):
        with pytest.raises(OSError, match="not now"):
            engine.step() if attempt else train(engine, 1, rank, first=3)
    engine.step() if failures else train(engine, 1, rank, first=3)
    return (weights(engine), engine.get_global_grad_norm(), engine.global_steps)


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@on_ranks(2)
def test_a_step_that_raised_may_be_repeated(rank, world, stage, dtype):
    straight, norm, steps = end_of(stage, dtype, rank, 0)
    retried, again, later = end_of(stage, dtype, rank, 2)
    assert steps == later == 2 and norm == pytest.approx(again, rel=1e-5), (stage, dtype)
    for a, b in zip(straight, retried, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
