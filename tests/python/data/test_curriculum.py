"""The difficulty of each step: formulas, members, settings that give none."""

import math
import random

import pytest

from deepspeed.data.random_ltd import RandomLTDScheduler
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from logs import logged
from refusals import refused
from sampling import every_case

STEPS = 20_000


def config(kind, low=8, high=1024, **settings):
    return {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": settings}


def root(steps, total, step, degree, low, high):
    level = math.floor((float(steps) / total) ** (1.0 / degree) * (high - low) + low)
    return min(max(level - level % step, low), high)


@pytest.mark.parametrize(
    ("kind", "low", "high", "step", "degree"),
    [
        ("fixed_linear", 8, 1024, 8, 1),
        ("fixed_linear", 1, 100, 1, 1),
        ("fixed_linear", 80, 1023, 8, 1),  # the maximum is not a multiple of the step
        ("fixed_root", 8, 1024, 8, 2),
        ("fixed_root", 16, 2048, 16, 3),
    ],
)
def test_difficulties_equal_the_formula_at_each_step(kind, low, high, step, degree):
    settings = {"total_curriculum_step": 15_000, "difficulty_step": step}
    if kind == "fixed_root":
        settings["root_degree"] = degree
    schedule = CurriculumScheduler(config(kind, low, high, **settings))
    found = [schedule.get_difficulty(i) for i in range(STEPS)]
    assert found == [root(i, 15_000, step, degree, low, high) for i in range(STEPS)]
    assert schedule.get_current_difficulty() == low, "asking for a difficulty changes nothing"
    current = [schedule.update_difficulty(i) for i in range(STEPS)]
    assert current == found and current == sorted(current)
    assert current[0] == low - low % step and current[-1] == high
    assert all(one % step == 0 for one in current if one != high)


def test_no_difficulty_is_below_the_minimum():
    for seed in range(1000 if every_case() else 60):
        draws = random.Random(seed)
        kind, high = draws.choice(["fixed_linear", "fixed_root"]), draws.choice([7, 64, 100, 1024])
        low, step, total = draws.randint(1, high), draws.randint(1, high), draws.choice([1, 3, 50, 400])
        settings = {"total_curriculum_step": total, "difficulty_step": step, "root_degree": draws.choice([1, 2, 3])}
        schedule = CurriculumScheduler(config(kind, low, high, **settings))
        found = [schedule.update_difficulty(i) for i in range(total + 3)]
        assert low <= min(found) and max(found) <= high and found == sorted(found), (seed, found[:5])
        kept = {"random_ltd_schedule": {"min_value": low, "max_value": high, "schedule_type": "fixed_linear"}}
        kept["random_ltd_schedule"]["schedule_config"] = {"require_steps": total, "seq_per_step": step}
        layers = {"total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_layer_id": [0], "global_batch_size": 4}
        tokens = [RandomLTDScheduler({**kept, **layers}).update_seq(i) for i in range(total + 3)]
        assert low <= min(tokens) and max(tokens) <= high and tokens == sorted(tokens), (seed, tokens[:5])


def test_discrete_difficulties():
    settings = {"difficulty": [1, 2, 3], "max_step": [5, 10]}
    schedule = CurriculumScheduler(config("fixed_discrete", 1, 3, **settings))
    wanted = [1] * 6 + [2] * 5 + [3] * (STEPS - 11)
    assert [schedule.get_difficulty(i) for i in range(STEPS)] == wanted
    assert [schedule.update_difficulty(i) for i in range(STEPS)] == wanted
    assert CurriculumScheduler(config("fixed_discrete", 4, 4, difficulty=[4], max_step=[])).get_difficulty(9) == 4


def test_discrete_difficulties_that_pass_the_maximum_are_taken_with_a_warning():
    settings = {"difficulty": [4, 20, 8], "max_step": [2, 4]}
    with logged() as said:
        schedule = CurriculumScheduler(config("fixed_discrete", 4, 16, **settings))
    assert [schedule.update_difficulty(i) for i in range(1, 8)] == [4, 4, 20, 20, 20, 20, 20]
    assert len(said) == 2 and "has 20, which is above max_difficulty 16" in said[0], said
    assert "the difficulties [8] after it are never used" in said[1]
    with logged() as said:
        CurriculumScheduler(config("fixed_discrete", 1, 3, difficulty=[1, 2, 3], max_step=[5, 10]))
        CurriculumScheduler(config("fixed_discrete", 1, 9, difficulty=[1, 2, 3], max_step=[5, 10]))
    assert not said


def test_a_function_gives_custom_difficulties_until_the_maximum():
    schedule = CurriculumScheduler(config("custom", 1, 50))
    refused(RuntimeError, "no function gives the difficulty", schedule.get_difficulty, 3)
    schedule.set_custom_get_difficulty(lambda step: 10 * (step % 7))
    assert [schedule.update_difficulty(step) for step in range(9)] == [0, 10, 20, 30, 40, 50, 50, 50, 50]


def test_the_state_goes_to_another_scheduler():
    first = CurriculumScheduler(config("fixed_linear", total_curriculum_step=100, difficulty_step=8))
    first.update_difficulty(40)
    state = first.get_state()
    assert state["current_difficulty"] == first.get_current_difficulty() == 408
    other = CurriculumScheduler(config("fixed_linear", total_curriculum_step=7, difficulty_step=4))
    other.set_state(dict(state))
    assert other.get_current_difficulty() == 408 and other.update_difficulty(50) == first.get_difficulty(50)
    other.set_current_difficulty(1024)
    assert other.update_difficulty(60) == 1024, "the maximum is kept"


LINEAR = {"total_curriculum_step": 10, "difficulty_step": 8}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (config("fixed_linear", 1025, **LINEAR), "min_difficulty 1025 is above max_difficulty 1024"),
        (config("fixed_linear", None, **LINEAR), "needs 'min_difficulty'"),
        (config("fixed_cubic", **LINEAR), "schedule_type 'fixed_cubic' is not one of fixed_linear"),
        (config("fixed_root", **LINEAR), "schedule_config.root_degree is missing: schedule_type 'fixed_root' needs it"),
        (config("fixed_linear", **{**LINEAR, "total_curriculum_step": 0}), "total_curriculum_step is 0: it must be"),
        (config("fixed_linear", **{**LINEAR, "difficulty_step": 2000}), "difficulty_step 2000 is above max_difficulty"),
        (config("fixed_discrete", difficulty=[1, 2], max_step=[3, 4]), "max_step has 2 items, and"),
        (config("fixed_discrete", difficulty=[1, 2, 3], max_step=[4, 3]), "does not rise: each item is the last"),
    ],
)
def test_settings_that_give_no_difficulty(given, text):
    refused(ValueError, text, CurriculumScheduler, given)
