"""Consumed tokens are those of a loop over the batches; learning rates and the end of the training follow them."""

import inspect

import pytest
import torch

import pipe_models
from deepspeed.engine.members import engine_parts
from deepspeed.optim.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR
from harness import on_ranks, run_ranks
from models import two_layers
from refusals import refused
from runs import NATIVE, engine_of, settings, together
from token_models import rows, tokens_of, train_step, word_engine

STEPS = 4
ON = {"data_efficiency": {"enabled": True}}


def totals(world, accumulate, **more):
    """Consumed tokens after each step."""
    found, sum_ = [], 0
    for step in range(STEPS):
        sum_ += tokens_of(step, world, accumulate, **more)
        found.append(sum_)
    return found


@pytest.mark.parametrize("how", ["mask", "ids", "told"])
@pytest.mark.parametrize("world, accumulate", [(1, 2), (2, 1), (4, 2)])
@on_ranks(init=True)
def test_counts_are_those_of_a_loop(rank, world, accumulate, how):
    engine = word_engine(accumulate, stage=world % 3, **ON)
    found, told = [], lambda: engine.count_tokens(7) if how == "told" else None
    for step in range(STEPS):
        train_step(engine, step, rank, how != "ids", told)
        found.append(engine.consumed_tokens)
    wanted = totals(world, accumulate, mask=how == "mask")
    assert found == ([7 * world * accumulate * (step + 1) for step in range(STEPS)] if how == "told" else wanted)
    assert not engine.training_ended()


@on_ranks(2, init=True)
def test_the_training_ends_at_the_step_that_reaches_the_limit(rank, world):
    sums = totals(world, 2)
    for limit, last in ((1, 0), (sums[1], 1), (sums[1] + 1, 2), (sums[3], 3)):
        engine, step = word_engine(2, max_train_tokens=limit), 0
        while not engine.training_ended():
            train_step(engine, step, rank)
            step += 1
        assert step - 1 == last and engine.consumed_tokens == sums[last]


@on_ranks(2, init=True, fresh=True)
def test_a_part_corrects_the_count(rank, world):
    @engine_parts.add("_halves")
    class Halves:
        def __init__(self, engine):
            pass

        def effective_tokens(self, tokens):
            return tokens * 0.5

    engine, wanted = word_engine(2, **ON), 0
    for step in range(STEPS):
        train_step(engine, step, rank)
        own = [rows(step, micro, one)[1].sum().item() * 0.5 for micro in range(2) for one in range(world)]
        wanted += sum(map(round, own))
    assert engine.consumed_tokens == wanted


@on_ranks(2, init=True)
def test_the_host_reads_the_sums_of_a_step_only_where_they_are_needed(rank, world):
    engine, needs = word_engine(1, **ON), word_engine(1, max_train_tokens=10**6)
    for step in range(STEPS):
        train_step(engine, step, rank)
        train_step(needs, step, rank)
        assert engine._tokens._late is not None and needs._tokens._late is None
    assert engine.consumed_tokens == needs.consumed_tokens == sum(tokens_of(one, world, 1) for one in range(STEPS))


@pytest.mark.parametrize("world", [2, 4])
@on_ranks(init=True)
def test_all_stages_of_a_pipeline_count(rank, world):
    engine = pipe_models.engine_of("tied", 2, world, 2, **ON)
    data = pipe_models.batches("tied", STEPS, 2, engine.grid.get_data_parallel_rank())
    for step in range(STEPS):
        engine.train_batch(data)
        assert engine.consumed_tokens == (step + 1) * 2 * pipe_models.MICRO * 4 * (world // 2)
    engine.count_tokens(5)
    engine.train_batch(pipe_models.batches("tied", 1, 2, 0))
    assert engine.consumed_tokens == STEPS * 2 * pipe_models.MICRO * 4 * (world // 2) + 5 * world // 2


def plain_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)


SCHEDULES = {
    "WarmupLR": (WarmupLR, {"warmup_num_steps": 60}),
    "WarmupDecayLR": (WarmupDecayLR, {"warmup_num_steps": 40, "total_num_steps": 150, "warmup_type": "linear"}),
    "WarmupCosineLR": (WarmupCosineLR, {"warmup_num_steps": 40, "total_num_steps": 150}),
}


@pytest.mark.parametrize("unit", ["tokens", "samples"])
@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(2, init=True)
def test_rates_are_the_formula_of_what_was_consumed(rank, world, name, unit):
    kind, params = SCHEDULES[name]
    params = {key: value if unit == "tokens" or "steps" not in key else value // 6 for key, value in params.items()}
    engine = word_engine(2, rate=0.5, scheduler={"type": name, "params": {**params, "unit": unit}})
    plain = kind(plain_optimizer(), **params)
    for step in range(STEPS + 2):
        assert engine.get_lr() == plain.get_last_lr()  # with which the next step is made
        train_step(engine, step, rank)
        done = sum(tokens_of(one, world, 2) for one in range(step + 1)) if unit == "tokens" else 8 * (step + 1)
        plain.step(done - 1)
        assert engine.lr_scheduler.state_dict() == {"last_batch_iteration": done - 1, "unit": unit}


@on_ranks(1, init=True)
def test_a_warm_up_by_steps_before_a_decay_by_tokens(rank, world):
    params = {"warmup_num_steps": 3, "total_num_steps": 80, "warmup_max_lr": 0.25, "warmup_type": "linear"}
    section = {"type": "WarmupDecayLR", "params": {**params, "unit": "tokens", "warmup_unit": "steps"}}
    engine, rates, done = word_engine(scheduler=section), [], [0]
    for step in range(7):
        rates.append(engine.get_lr()[0])
        train_step(engine, step, rank)
        done.append(engine.consumed_tokens)
    end = done[4] - 1  # iteration 3 is that after the fourth step
    fall = [0.25 * max(0, (80 - (tokens - 1)) / (80 - end)) for tokens in done[4:7]]
    assert rates == pytest.approx([0, 0, 0.25 / 3, 0.25 * 2 / 3, *fall]) and fall[0] == 0.25 > fall[2]


SAVED = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 900, "unit": "tokens"}}
SAVED["params"]["warmup_unit"] = "steps"


def save(rank, world, folder, before, native):
    engine = word_engine(2, stage=2, scheduler=SAVED, checkpoint=NATIVE if native else None)
    for step in range(before):
        train_step(engine, step, rank)
    ids, mask = rows(9, 0, rank)
    engine.backward(engine(ids, attention_mask=mask))  # a window that is lost
    engine.step()
    engine.save_checkpoint(folder)
    return engine.consumed_tokens, engine.get_lr(), engine.lr_scheduler.state_dict()


def load(rank, world, folder, unit="tokens"):
    section = {**SAVED, "params": {**SAVED["params"], "unit": unit}}
    engine = word_engine(2, stage=2, scheduler=section)
    if unit != "tokens":
        refused(ValueError, "has counted tokens, and this one counts samples", lambda: engine.load_checkpoint(folder))
        return None
    engine.load_checkpoint(folder)
    found = engine.consumed_tokens, engine.get_lr(), engine.lr_scheduler.state_dict()
    train_step(engine, 3, rank)
    assert engine.consumed_tokens == found[0] + tokens_of(3, world, 2)
    return found


@pytest.mark.parametrize("before, native", [(1, True), (4, False)])
def test_checkpoints_have_the_count_for_any_number_of_ranks(before, native, tmp_path):
    saved = run_ranks(2, save, str(tmp_path), before, native, init=True)
    assert saved[0][0] == sum(tokens_of(step, 2, 2) for step in range(before))
    for world in (1, 2, 4):
        assert run_ranks(world, load, str(tmp_path), init=True) == [saved[0]] * world
    run_ranks(1, load, str(tmp_path), "samples", init=True)


@on_ranks(2, init=True)
def test_what_cannot_be_counted_is_told(rank, world):
    def step(engine):
        engine.backward(engine(torch.ones(2, 6)).sum())
        engine.step()

    engine = engine_of(two_layers(), settings(0))
    refused(RuntimeError, "tokens are not counted in this run", lambda: engine.consumed_tokens)
    assert not hasattr(engine, "consumed_tokens") and "train" in dict(inspect.getmembers(engine))
    refused(RuntimeError, "tokens are not counted in this run", lambda: engine.count_tokens(3))
    engine = engine_of(two_layers(), settings(0, **ON))
    step(engine)
    refused(RuntimeError, "step 0 has micro-batches for which the tokens cannot be", lambda: engine.consumed_tokens)
    engine = engine_of(two_layers(), settings(0, max_train_tokens=100))
    refused(RuntimeError, "this step has 2 micro-batches for which the tokens cannot be counted", lambda: step(engine))
    refused(ValueError, "a whole number >= 0", lambda: engine.count_tokens(-1))
    engine.count_tokens(3)
    engine.step()
    assert together(engine.consumed_tokens) == [3 * world] * world
