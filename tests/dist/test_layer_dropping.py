"""Progressive layer dropping in an engine: what all ranks leave out, gathers, recomputations, keywords, a restart."""

import functools

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.progressive_layer_drop import convert_to_pld
from harness import on_ranks
from layer_models import Block, Transformer, batch_of, loss_of, token_dropping
from models import Parts, Recomputed, beside, two_layers
from plain import Plain
from runs import engine_of, identical, last_of, raised, settings, take_step, together, weights

DROP = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 10.0}}  # the half, from step 1 on


class Scaled(Block):
    """With a parameter of the layer itself."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.scale = nn.Parameter(torch.ones(self.norm.normalized_shape))

    def forward(self, hidden_states, attention_mask=None):
        return super().forward(hidden_states, attention_mask) * self.scale


class Net(Transformer):
    def __init__(self, layers=6, reentrant=None):
        super().__init__(layers=0)
        torch.manual_seed(1)
        self.h = nn.ModuleList(Scaled() for _ in range(layers))
        self.reentrant = reentrant

    def forward(self, batch):
        x = self.into(beside(self.into.weight, batch))
        for layer in self.h:
            x = layer(x) if self.reentrant is None else Recomputed.forward(_one(layer, self.reentrant), x)
        return self.head(x)


def _one(layer, reentrant):
    return type("", (), {"layers": [layer], "reentrant": reentrant})


def engine_with(stage=0, accumulate=1, drop=DROP, model=None, zero=(), **more):
    engine = engine_of(model or Net(), settings(stage, accumulate=accumulate, zero=zero, **drop, **more))
    return convert_to_pld(engine, Block)


def steps(engine, count=5, rank=0, first=0):
    return [
        take_step(engine, loss_of(engine, batch_of(step, first=2 * rank + 10 * micro)))
        for step in range(first, first + count)
        for micro in range(engine.gradient_accumulation_steps())
    ]


def plain_steps(world, count, plan, theta=0.5):
    """One process with all samples: dropped layers are left out, what others add is divided by the probability."""

    def loss_at(model, step, rank):
        plan.place(step, 0, 1.0 if step == 0 else theta)
        batch = batch_of(step, first=2 * rank)
        x = model.into(batch)
        for number, layer in enumerate(model.h):
            if number not in plan.dropped:
                x = x + (layer(x) - x) / plan.probability
        return nn.functional.cross_entropy(model.head(x)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    plain = Plain(Net(), functools.partial(torch.optim.SGD, lr=0.3), dtype=None).run(loss_at, range(count), world)
    return [param.detach() for param in plain.params.values()]


BETWEEN_HOSTS = {"DS_PEER_MEMORY": "0"}  # every gather is a collective


@pytest.mark.parametrize("stage, env", [(0, {}), (1, {}), (2, {}), (3, {}), (3, BETWEEN_HOSTS)])
@on_ranks(2, given=("env",))
def test_ranks_drop_the_same_layers_and_train_like_one_process(rank, world, stage):
    engine = engine_with(stage, zero={"reduce_bucket_size": 600}, optimizer="SGD", rate=0.3, gradient_clipping=0.0)
    plan = engine._layer_dropping._plan
    dropped = []
    for step in range(5):
        steps(engine, 1, rank, first=step)
        dropped.append(plan.dropped)
    assert together(dropped) and not dropped[0] and len(set(dropped)) > 2
    for mine, theirs in zip(last_of(engine), plain_steps(world, 5, plan)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def gathered(engine, batch):
    engine.core.gatherer.reset_counters()
    take_step(engine, loss_of(engine, batch))
    return engine.core.gatherer.gathered_elements


@on_ranks(2)
def test_stage_3_does_not_gather_dropped_layers(rank, world):
    all_dropped = {"progressive_layer_drop": {"enabled": True, "theta": 0.0, "gamma": 1000.0}}
    engine, without = engine_with(3, drop=all_dropped), engine_of(Net(layers=0), settings(3))
    for step in range(4):
        wanted, found = gathered(without, batch_of(step)), gathered(engine, batch_of(step))
        assert engine.get_pld_theta() == (1.0 if step == 0 else 0.0)
        assert (found > wanted) if step == 0 else (found == wanted), (step, found, wanted)
    with torch.no_grad():  # an evaluation runs all of them, trained or not
        engine.core.gatherer.reset_counters()
        engine.eval()
        engine(batch_of(0))
        layers = sum(param.ds_numel for param in engine.module.h.parameters())
        assert engine.core.gatherer.gathered_elements >= layers // 2
    # Layers of a part: as many fewer as are dropped.
    engine, per_layer = engine_with(3, zero={"stage3_max_reuse_distance": 0}), set()
    whole = gathered(engine, batch_of(0))
    for step in range(1, 6):
        found = gathered(engine, batch_of(step))
        per_layer.add((whole - found, len(engine._layer_dropping._plan.dropped)))
    assert all(fewer > 0 for fewer, dropped in per_layer if dropped), per_layer


def counts_of(engine, step, rank):
    """``[gathered elements, collectives, exchanges]`` of a step, and how many layers have run in it."""
    gatherer, ran = engine.core.gatherer, 0
    gatherer.reset_counters()
    for micro in range(engine.gradient_accumulation_steps()):
        take_step(engine, loss_of(engine, batch_of(step, first=2 * rank + 10 * micro)))
        ran += len(engine.module.h) - len(engine._layer_dropping.dropped())
    return [gatherer.gathered_elements, gatherer.collectives, gatherer.exchanges], ran


@pytest.mark.any_device
@pytest.mark.parametrize("accumulate, zero", [(1, {"stage3_max_reuse_distance": 0}), (2, {})])
@on_ranks(2, env=BETWEEN_HOSTS)
def test_between_hosts_dropped_layers_are_neither_gathered_nor_asked_for(rank, world, accumulate, zero, tmp_path):
    found = []
    for layers in (0, 6):  # steps that leave out nothing
        engine = engine_of(Net(layers), settings(3, accumulate=accumulate, zero=zero))
        found.append([counts_of(engine, step, rank)[0] for step in range(4)][-1])
    none, whole = found
    assert engine.core.gatherer.source == "scheduled collectives" and whole[0] > none[0] and whole[1] > none[1]
    assert whole[2] == none[2] == 2 * accumulate + 2, "they begin and end each backward, and two come with the step"

    def wanted(ran):
        return [less + ran * (more - less) // (6 * accumulate) for less, more in zip(none, whole)]

    engine = engine_with(3, accumulate, zero=zero)
    for step in range(12):
        found, ran = counts_of(engine, step, rank)
        if step > 1:  # before, gathers that the first step wanted and the others do not are still in the order
            assert found == wanted(ran), step
    # The first steps of a run that goes on leave out layers. The order lacks a layer until it runs for the first time.
    engine.save_checkpoint(tmp_path, tag="t")
    other, asked = engine_with(3, accumulate, zero=zero), 0
    other.load_checkpoint(tmp_path, tag="t")
    for step in range(12, 30):
        found, ran = counts_of(other, step, rank)
        asked += found[2] > none[2]
        if step >= 24:
            assert found == wanted(ran), step
    assert 0 < asked <= 6


@on_ranks(2)
def test_layers_that_run_though_the_core_leaves_them_out(rank, world):
    results = []
    for stage in (0, 3):
        engine = engine_with(stage, zero={"reduce_bucket_size": 600}, optimizer="SGD", rate=0.3)
        steps(engine, 2, rank)
        engine.module.eval()  # behind the engine's back: layers run in the evaluation
        results.append((steps(engine, 3, rank, first=2), last_of(engine)))
    for mine, theirs in zip(results[0][1], results[1][1]):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(1)
def test_recomputed_layers_drop_the_same(rank, world, stage):
    results = []
    for reentrant in (None, True, False):
        engine = engine_with(stage, 2, model=Net(reentrant=reentrant))
        results.append((steps(engine), last_of(engine)))
    assert all(losses == results[0][0] and identical(end, results[0][1]) for losses, end in results)


@on_ranks(1)
def test_a_theta_of_1_is_the_plain_model_and_a_dropped_layer_is_not_updated(rank, world):
    kept = engine_with(drop={"progressive_layer_drop": {"enabled": True}})
    plain = engine_of(Net(), settings(0))
    assert steps(kept) == steps(plain) and identical(last_of(kept), last_of(plain))
    engine = engine_with()
    steps(engine, 1)
    before = weights(engine)
    steps(engine, 1, first=1)
    dropped = engine._layer_dropping._plan.dropped
    assert dropped
    for name, value in weights(engine).items():
        left_out = name.startswith("h.") and int(name.split(".")[1]) in dropped
        assert torch.equal(value, before[name]) == left_out, name


@on_ranks(1)
def test_a_resumed_run_drops_what_the_undisturbed_one_drops(rank, world, tmp_path):
    slow = {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 0.3}}
    engine = engine_with(drop=slow)
    steps(engine, 3)
    engine.save_checkpoint(tmp_path, tag="t")
    wanted = steps(engine, 4, first=3), engine.get_pld_theta()
    other = engine_with(drop=slow)
    other.load_checkpoint(tmp_path, tag="t")
    assert (steps(other, 4, first=3), other.get_pld_theta()) == wanted


@on_ranks(1)
def test_models_that_know_it_get_the_keywords(rank, world):
    given = []

    def run(self, x, progressive_layer_drop=False, pld_theta=None):
        given.append((progressive_layer_drop, pld_theta))
        return self.layer(x)

    engine = engine_of(Parts(run, layer=two_layers()), settings(0, **DROP))
    thetas = []
    for _ in range(3):
        take_step(engine, engine(torch.ones(2, 6)).sum())
        thetas.append(engine.get_pld_theta())
    assert given == [(True, theta) for theta in thetas]  # the value that the last forward used
    assert thetas[0] == 1.0 and thetas[1] == pytest.approx(0.5, abs=1e-4)
    engine.eval()
    engine(torch.ones(2, 6))
    assert given[-1] == (False, None)
    assert engine.pld_enabled() and engine.progressive_layer_drop.get_state()["pld_theta"] == thetas[-1]
    assert engine_of(two_layers(), settings(0)).get_pld_theta() is None


@on_ranks(1)
def test_a_model_that_was_converted_before_and_both_kinds_of_dropping(rank, world):
    before = engine_of(convert_to_pld(Net(), Block), settings(0, **DROP))
    assert steps(before) == steps(engine_with())
    both = engine_with(model=Net(4), **token_dropping())
    deepspeed.runtime.data_pipeline.data_routing.helper.convert_to_random_ltd(both, Block)
    assert len(set(steps(both, 6))) == 6
    assert both.data_efficiency_report()["kept_tokens"] == 12 and both.get_pld_theta() == pytest.approx(0.5)


@on_ranks(1)
def test_refused(rank, world):
    strict = settings(0, **DROP, zero={"ignore_unused_parameters": False})
    plain = engine_of(two_layers(), settings(0, **DROP))
    texts = {
        "and the configuration does not enable it": raised(convert_to_pld, engine_of(Net(), settings(0)), Block),
        "ignore_unused_parameters is false": raised(convert_to_pld, engine_of(Net(), strict), Block),
        "Sequential.forward does not take the keywords progressive_layer_drop, pld_theta": raised(
            plain, torch.ones(2, 6)
        ),
        "theta": raised(engine_of, Net(), settings(0, progressive_layer_drop={"enabled": True, "theta": 1.5})),
    }
    for text, error in texts.items():
        assert text in str(error), (text, error)
