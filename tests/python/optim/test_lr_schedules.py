"""Schedules against closed forms written here, and how they treat optimizers, groups, state and wrong parameters."""

import argparse
import json
import math
import random
from types import SimpleNamespace

import pytest
import torch

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
)
from refusals import refused
from sampling import every_case

STEPS = 5000


def adam(*rates, **kwargs):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.01,)]
    return torch.optim.Adam(groups, **kwargs)


def trace(schedule, read, steps=STEPS):
    """`read(optimizer)` before the first step (index 0) and after each of `steps` steps: index k is iteration k - 1."""
    return [read(schedule.optimizer), *(read(walked(schedule, 1).optimizer) for _ in range(steps))]


def walked(schedule, steps):
    for _ in range(steps):
        schedule.step()
    return schedule


def first_lr(optimizer):
    return optimizer.param_groups[0]["lr"]


def groups_of(schedule, key="lr"):
    return [group[key] for group in schedule.optimizer.param_groups]


def close(got, expected, rel=1e-12, least=1e-18):
    for k, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a == pytest.approx(b, rel=rel, abs=least), f"after {k} steps: {a} instead of {b}"


# ---- curves --------------------------------------------------------------------------------------------------------


def log_rise(iteration, steps):
    return min(1.0, math.log(iteration + 1) / math.log(steps)) if iteration > 0 else 0.0


def linear_rise(iteration, steps):
    return min(1.0, max(0, iteration) / steps)


@pytest.mark.parametrize("kind, rise", [("log", log_rise), ("linear", linear_rise)])
@pytest.mark.parametrize("warmup", [2, 7, 1000, 6000])
def test_warmup_lr(kind, rise, warmup):
    schedule = WarmupLR(adam(), warmup_min_lr=1e-5, warmup_max_lr=3e-3, warmup_num_steps=warmup, warmup_type=kind)
    close(trace(schedule, first_lr), [1e-5 + (3e-3 - 1e-5) * rise(i, warmup) for i in range(-1, STEPS)])


def test_warmup_lr_peak_is_exact():
    schedule = WarmupLR(adam(), warmup_min_lr=0.1, warmup_max_lr=0.3, warmup_num_steps=19)
    rates = trace(schedule, first_lr, 50)
    assert rates[0] == 0.1 and rates[1] == 0.1 and all(rate == 0.3 for rate in rates[19:]) and rates[18] < 0.3


def test_warmup_lr_of_an_existing_checkpoint():
    """The rate that DeepSpeed 0.19.6 wrote after 4 of 10 warm-up steps to 0.01."""
    schedule = walked(WarmupLR(adam(), warmup_min_lr=0, warmup_max_lr=0.01, warmup_num_steps=10), 4)
    assert schedule.state_dict() == {"last_batch_iteration": 3}
    assert schedule.get_lr() == [pytest.approx(0.006020599913279623, rel=1e-15)]


def test_warmup_lr_default_peak_is_the_groups_own_rate():
    assert walked(WarmupLR(adam(0.5, 0.25), warmup_num_steps=10), 20).get_lr() == [0.5, 0.25]


@pytest.mark.parametrize("kind, rise", [("log", log_rise), ("linear", linear_rise)])
@pytest.mark.parametrize("warmup, total", [(10, 30), (1000, 4000), (1000, 6000)])
def test_warmup_decay_lr(kind, rise, warmup, total):
    schedule = WarmupDecayLR(
        adam(), total_num_steps=total, warmup_min_lr=2e-5, warmup_max_lr=4e-3, warmup_num_steps=warmup, warmup_type=kind
    )
    rates = trace(schedule, first_lr)

    def closed_form(i):
        share = rise(i, warmup) if i < warmup else max(0.0, 1 - (i - warmup) / (total - warmup))
        return 2e-5 + (4e-3 - 2e-5) * share

    close(rates, [closed_form(i) for i in range(-1, STEPS)])
    assert rates[warmup + 1] == 4e-3  # iteration `warmup`, the start of the line
    if total <= STEPS:
        assert rates[total] > 2e-5
    if total < STEPS:
        assert all(rate == 2e-5 for rate in rates[total + 1 :])


@pytest.mark.parametrize("kind, rise", [("log", log_rise), ("linear", linear_rise)])
@pytest.mark.parametrize("warmup, total, floor", [(10, 100, 0.1), (1000, 4000, 0.0), (20, 6000, 0.01)])
def test_warmup_cosine_lr(kind, rise, warmup, total, floor):
    schedule = WarmupCosineLR(
        adam(0.02, 0.4),
        total_num_steps=total,
        warmup_min_ratio=0.2,
        warmup_num_steps=warmup,
        cos_min_ratio=floor,
        warmup_type=kind,
    )
    first, second = zip(*trace(schedule, lambda o: [group["lr"] for group in o.param_groups]))

    def closed_form(i):
        if i < warmup:
            return 0.2 + 0.8 * rise(i, warmup)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (i - warmup + 1) / (total - warmup))))

    ratios = [closed_form(i) for i in range(-1, STEPS)]
    for rates, base in ((first, 0.02), (second, 0.4)):
        close(rates, [base * ratio for ratio in ratios], 1e-9, 1e-12)
    assert schedule.get_lr_ratio() == pytest.approx(ratios[-1], rel=1e-9, abs=1e-12)
    if total < STEPS:
        assert all(rate == 0.02 * floor for rate in first[total:]), "the floor is reached at the last step and kept"


@pytest.mark.parametrize("staircase", [False, True])
@pytest.mark.parametrize("size, rate", [(200, 5.0), (7, 0.5), (2000, 50.0)])
def test_lr_range_test(size, rate, staircase):
    rates = trace(LRRangeTest(adam(), 1e-4, size, rate, staircase), first_lr)
    close(rates, [1e-4 * (1 + rate * (k // size if staircase else k / size)) for k in range(STEPS + 1)])
    if staircase:
        assert all(len(set(rates[k : k + size])) == 1 for k in range(0, STEPS, size))


def test_lr_range_test_growth_is_proportional_to_the_rate():
    slow, fast = (trace(LRRangeTest(adam(), 1e-4, 200, rate), first_lr) for rate in (5, 50))
    close([rate - 1e-4 for rate in fast[1:]], [10 * (rate - 1e-4) for rate in slow[1:]], 1e-9, 0)


CYCLES = [(1000, 1000, 0), (700, 1900, 300), (10, 3, 1), (1, 1, 50), (4000, 2000, 0)]


def triangle(k, first, second, first_stairs=0, second_stairs=0):
    """Height of the cycle after k steps, and how many steps lie behind its end."""
    if k <= first:
        return (k / first if not first_stairs else (k * first_stairs // first) / first_stairs), 0
    if k < first + second:
        down = k - first
        return 1 - (down / second if not second_stairs else (down * second_stairs // second) / second_stairs), 0
    return 0.0, k - first - second


@pytest.mark.parametrize("stairs", [(0, None), (5, None), (4, 10)])
@pytest.mark.parametrize("first, second, decay", CYCLES)
def test_one_cycle(first, second, decay, stairs):
    schedule = OneCycle(
        adam(),
        cycle_min_lr=1e-4,
        cycle_max_lr=1e-2,
        decay_lr_rate=0.25,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        cycle_first_stair_count=stairs[0],
        cycle_second_stair_count=stairs[1],
        decay_step_size=decay,
        cycle_min_mom=0.8,
        cycle_max_mom=0.95,
        decay_mom_rate=1e-5,
    )
    trail = trace(schedule, lambda o: (o.param_groups[0]["lr"], o.param_groups[0]["betas"]))
    second_stairs = stairs[0] if stairs[1] is None else stairs[1]
    for k, (rate, betas) in enumerate(trail):
        height, past = triangle(k, first, second, stairs[0], second_stairs)
        units = past / decay if decay else 0
        expected = (1e-4 + (1e-2 - 1e-4) * height) / (1 + 0.25 * units)
        assert rate == pytest.approx(expected, rel=1e-12), f"rate after {k} steps"
        momentum = (0.95 - 0.15 * height) * (1 + 1e-5 * units)
        if k > 0:
            assert betas == (pytest.approx(momentum, rel=1e-12), 0.999), f"betas after {k} steps"
    assert trail[0] == (1e-4, (0.8, 0.999)), "the smallest momentum until the first step, as published"
    if first <= STEPS:
        assert trail[first] == (1e-2, (0.8, 0.999)), "the peak is exact, and the momentum lowest there"
    if first + second <= STEPS:
        assert trail[first + second] == (1e-4, (0.95, 0.999)), "the cycle ends where it began"


def test_one_cycle_without_a_second_half():
    schedule = OneCycle(adam(), 0.1, 0.5, 1.0, cycle_first_step_size=4, cycle_second_step_size=0, decay_step_size=1)
    assert schedule.min_lrs == [0.1] and schedule.max_lrs == [0.5]
    close(trace(schedule, first_lr, 6), [0.1, 0.2, 0.3, 0.4, 0.1, 0.1 / 2, 0.1 / 3])
    refused(ValueError, "cycle_second_step_size = -1", OneCycle, adam(), 0.1, 0.5, cycle_second_step_size=-1)


def test_one_cycle_with_lists_sets_each_group_at_construction():
    optimizer = adam(1, 1)
    schedule = OneCycle(
        optimizer, [0.1, 0.2], [0.5, 0.8], cycle_first_step_size=4, cycle_min_mom=[0.5, 0.6], cycle_max_mom=[0.8, 0.9]
    )
    assert groups_of(schedule) == [0.1, 0.2] and schedule.optimizer is optimizer
    assert groups_of(schedule, "betas") == [(0.5, 0.999), (0.6, 0.999)] == schedule.min_moms
    assert schedule.max_moms == [(0.8, 0.999), (0.9, 0.999)] and schedule.min_lrs == [0.1, 0.2]
    assert groups_of(walked(schedule, 4)) == [0.5, 0.8] and groups_of(schedule, "betas") == schedule.min_moms
    assert (schedule.total_size, schedule.step_ratio) == (8.0, 0.5)
    words = "cycle_min_mom has 3 values.*2 parameter groups"
    refused(ValueError, words, OneCycle, optimizer, 0.1, 0.2, cycle_min_mom=[0.5, 0.6, 0.7])


@pytest.mark.parametrize("first, second, ratio", [(4, None, 0.5), (4, 12, 0.25), (4, 0, 1.0)])
def test_one_cycle_step_ratio(first, second, ratio):
    schedule = OneCycle(adam(), 0.1, 0.5, cycle_first_step_size=first, cycle_second_step_size=second)
    assert schedule.step_ratio == ratio and schedule.total_size == first / ratio


class _Rateless(torch.optim.Optimizer):
    def __init__(self, **defaults):
        super().__init__([torch.nn.Parameter(torch.zeros(1))], defaults)


def test_groups_without_a_rate():
    optimizer = _Rateless()
    OneCycle(optimizer, 0.1, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.1
    none = "group 0 of _Rateless has no lr.*"
    refused(ValueError, f"{none}or the schedule the parameter warmup_max_lr", WarmupLR, _Rateless())
    refused(ValueError, f"{none}Give the group one.", WarmupCosineLR, _Rateless(), total_num_steps=20)
    assert WarmupLR(_Rateless(), warmup_max_lr=0.1).get_lr() == [0.0]


def test_one_cycle_takes_betas_from_the_defaults():
    optimizer = _Rateless(betas=(0.9, 0.99))
    del optimizer.param_groups[0]["betas"]
    schedule = OneCycle(optimizer, 0.1, 0.5, cycle_min_mom=0.6, cycle_max_mom=0.7)
    assert optimizer.param_groups[0]["betas"] == (0.6, 0.99) and schedule.max_moms == [(0.7, 0.99)]


@pytest.mark.parametrize("make", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_warmup_type_is_kept_and_an_unknown_one_is_log(make, capsys):
    more = {} if make is WarmupLR else {"total_num_steps": 20}
    made = {kind: make(adam(), warmup_num_steps=8, warmup_type=kind, **more) for kind in ("log", "linear", "cubic")}
    assert "warmup_type = 'cubic' is not known" in "".join(capsys.readouterr())
    assert [one.warmup_type for one in made.values()] == ["log", "linear", "log"]
    log, linear, cubic = (trace(one, first_lr, 20) for one in made.values())
    assert cubic == log != linear


def test_one_cycle_second_half_defaults_to_the_first():
    one, both = ({"cycle_first_step_size": 6, **more} for more in ({}, {"cycle_second_step_size": 6}))
    assert trace(OneCycle(adam(), 0.1, 0.5, **one), first_lr, 30) == trace(
        OneCycle(adam(), 0.1, 0.5, **both), first_lr, 30
    )


def test_one_cycle_on_a_momentum_optimizer():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.5)
    schedule = OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=4, cycle_min_mom=0.6, cycle_max_mom=0.9)
    momenta = trace(schedule, lambda o: o.param_groups[0]["momentum"], 8)
    assert momenta == pytest.approx([0.6, 0.825, 0.75, 0.675, 0.6, 0.675, 0.75, 0.825, 0.9])
    assert schedule.get_mom() == [pytest.approx(0.9)]


@pytest.mark.parametrize("make", ["adam", "sgd"])
def test_random_cycles(make):
    for seed in range(1000 if every_case() else 40):
        draws = random.Random(seed)
        first, second, decay = draws.randint(1, 20), draws.choice([1, 4, 7]), draws.choice([0, 1, 5])
        low, high = sorted(draws.uniform(0, 0.9999) for _ in range(2))
        rate, slower = draws.choice([0.0, 0.01, 0.5]), draws.choice([0.0, 0.3])
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = adam() if make == "adam" else torch.optim.SGD([weight], lr=0.1, momentum=0.5)
        sizes = {"cycle_first_step_size": first, "cycle_second_step_size": second, "decay_step_size": decay}
        moms = {"cycle_min_mom": low, "cycle_max_mom": high, "decay_mom_rate": rate}
        schedule = OneCycle(optimizer, 1e-4, 1e-2, slower, **sizes, **moms)

        def read(one):
            group = one.param_groups[0]
            return group["lr"], group["betas"][0] if make == "adam" else group["momentum"]

        for k, (found, momentum) in enumerate(trace(schedule, read, 60)):
            height, past = triangle(k, first, second)
            units = past / decay if decay else 0
            assert found == pytest.approx((1e-4 + (1e-2 - 1e-4) * height) / (1 + slower * units)), (seed, k)
            wanted = min((high - (high - low) * height) * (1 + rate * units), max(high, 0.999)) if k else low
            assert momentum == pytest.approx(wanted) and momentum < 1, (seed, k)


@pytest.mark.parametrize("largest, cap", [(0.95, 0.999), (0.9995, 0.9995)])
def test_one_cycle_keeps_momenta_below_1(largest, cap):
    sizes = {"cycle_first_step_size": 5, "decay_step_size": 5, "cycle_max_mom": largest, "decay_mom_rate": 0.05}
    trail = trace(OneCycle(adam(), 1e-4, 1e-3, **sizes), lambda o: o.param_groups[0]["betas"][0], 60)
    assert max(trail) == trail[-1] == cap and trail[10] == pytest.approx(largest)


def test_one_cycle_without_momentum():
    off = OneCycle(adam(betas=(0.5, 0.6)), 0.1, 0.2, cycle_momentum=False)
    assert off.get_mom() is None and off.optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert OneCycle(torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(1))]), 0.1, 0.2).get_mom() is None


# ---- groups, optimizers, state -------------------------------------------------------------------------------------

MAKERS = {
    "LRRangeTest": lambda o: LRRangeTest(o, lr_range_test_step_size=3),
    "OneCycle": lambda o: OneCycle(o, 0.1, 0.5, 0.1, 5, 9, decay_step_size=4),
    "WarmupLR": lambda o: WarmupLR(o, warmup_num_steps=8),
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, 30, warmup_num_steps=8),
    "WarmupCosineLR": lambda o: WarmupCosineLR(o, 30, warmup_num_steps=8),
}
each_schedule = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def test_lists_give_each_group_its_rates():
    schedule = WarmupLR(adam(1, 1), warmup_min_lr=[0.1, 0.2], warmup_max_lr=(1.0, 2.0), warmup_num_steps=2)
    assert groups_of(schedule) == [0.1, 0.2]
    schedule.step(5)
    assert groups_of(schedule) == [1.0, 2.0]
    assert LRRangeTest(adam(1, 1), [0.1, 0.2]).get_lr() == [0.1, 0.2]
    assert OneCycle(adam(1, 1), [0.1, 0.2], [0.3, 0.4]).get_lr() == [0.1, 0.2]


@each_schedule
def test_groups_hold_the_rate_before_the_first_step(make):
    schedule = make(adam(0.01, 0.02))
    assert schedule.last_batch_iteration == -1
    assert schedule.get_lr() == schedule.get_last_lr() == groups_of(schedule)


@each_schedule
def test_state_continues_in_the_middle(make):
    whole, part, resumed = (make(adam(0.01, 0.02)) for _ in range(3))
    state = json.loads(json.dumps(walked(part, 13).state_dict()))
    assert state == {"last_batch_iteration": 12}
    resumed.load_state_dict(state)
    rates = lambda optimizer: [(group["lr"], group["betas"]) for group in optimizer.param_groups]
    assert trace(resumed, rates, 30) == trace(walked(whole, 13), rates, 30)


@each_schedule
def test_step_to_a_given_iteration(make):
    stepped, jumped = walked(make(adam()), 12), make(adam())
    jumped.step(11)
    assert jumped.last_batch_iteration == 11 and jumped.get_lr() == stepped.get_lr() == stepped.get_last_lr()
    assert walked(jumped, 1).last_batch_iteration == 12


def test_start_at_an_iteration():
    started, stepped = (WarmupLR(adam(), warmup_num_steps=8, last_batch_iteration=at) for at in (3, -1))
    stepped.step(3)
    assert groups_of(started) == groups_of(stepped)


@each_schedule
def test_what_counts_as_an_optimizer(make):
    inner, bare = adam(), SimpleNamespace(param_groups=[{"lr": 0.5, "params": []}])
    assert make(SimpleNamespace(optimizer=inner)).optimizer is inner and make(bare).optimizer is bare
    for wrong in (None, SimpleNamespace(optimizer=None), [1], torch.nn.Linear(1, 1)):
        refused(TypeError, "needs a torch.optim.Optimizer", make, wrong)


def test_rate_kept_as_a_tensor_is_written_in_place():
    optimizer = adam()
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    WarmupLR(optimizer, warmup_max_lr=0.25, warmup_num_steps=2).step(10)
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.25


@each_schedule
def test_group_added_later_is_refused(make):
    schedule = make(adam())
    schedule.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    refused(ValueError, "has 2 parameter groups now, but had 1", schedule.step)


# ---- wrong parameters ----------------------------------------------------------------------------------------------

WRONG = [
    (WarmupLR, {"warmup_type": None}, TypeError, "warmup_type"),
    (WarmupLR, {"warmup_num_steps": -1}, ValueError, "warmup_num_steps = -1"),
    (WarmupLR, {"warmup_num_steps": None}, ValueError, "warmup_num_steps is None"),
    (WarmupDecayLR, {"total_num_steps": 9, "warmup_num_steps": None}, ValueError, "warmup_num_steps is None"),
    (WarmupCosineLR, {"total_num_steps": 9, "warmup_num_steps": None}, ValueError, "warmup_num_steps is None"),
    (WarmupLR, {"warmup_num_steps": 1.5}, TypeError, "warmup_num_steps must be a whole number"),
    (WarmupLR, {"warmup_min_lr": 1.0, "warmup_max_lr": 0.5}, ValueError, "warmup_min_lr = 1 is above warmup_max_lr"),
    (WarmupLR, {"warmup_max_lr": float("nan")}, ValueError, "warmup_max_lr = nan"),
    (WarmupLR, {"warmup_max_lr": "auto"}, TypeError, "warmup_max_lr must be a number, got 'auto'"),
    (WarmupLR, {"warmup_max_lr": [0.1, 0.2]}, ValueError, "warmup_max_lr has 2 values.*1 parameter groups"),
    (WarmupLR, {"last_batch_iteration": "x"}, TypeError, "last_batch_iteration"),
    (WarmupDecayLR, {"total_num_steps": 0}, ValueError, "total_num_steps = 0"),
    (WarmupDecayLR, {"total_num_steps": None}, TypeError, "total_num_steps"),
    (WarmupCosineLR, {"total_num_steps": -3}, ValueError, "total_num_steps = -3"),
    (WarmupCosineLR, {"total_num_steps": 9, "cos_min_ratio": 1.5}, ValueError, "cos_min_ratio = 1.5"),
    (WarmupCosineLR, {"total_num_steps": 9, "warmup_min_ratio": -1}, ValueError, "warmup_min_ratio = -1"),
    (LRRangeTest, {"lr_range_test_step_size": 0}, ValueError, "lr_range_test_step_size = 0"),
    (LRRangeTest, {"lr_range_test_step_rate": -2.0}, ValueError, "lr_range_test_step_rate = -2"),
    (LRRangeTest, {"lr_range_test_min_lr": [1.0] * 3}, ValueError, "lr_range_test_min_lr has 3 values"),
    (OneCycle, {"cycle_min_lr": 0.2, "cycle_max_lr": 0.1}, ValueError, "cycle_min_lr = 0.2 is above"),
    (
        OneCycle,
        {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0},
        ValueError,
        "cycle_first_step_size = 0",
    ),
    (OneCycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_step_size": -1}, ValueError, "decay_step_size = -1"),
    (OneCycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_lr_rate": -1}, ValueError, "decay_lr_rate = -1"),
    (OneCycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1.5}, ValueError, "cycle_max_mom = 1.5"),
    (OneCycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_stair_count": -1}, ValueError, "stair_count = -1"),
]


@pytest.mark.parametrize("schedule, params, error, text", WRONG)
def test_wrong_parameters(schedule, params, error, text):
    refused(error, text, schedule, adam(), **params)


def test_whole_number_given_as_float_is_one():
    assert WarmupDecayLR(adam(), total_num_steps=1e5).total_num_steps == 100000


# ---- the contract's names ------------------------------------------------------------------------------------------


def test_names():
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    assert [getattr(lr_schedules, name).__name__ for name in VALID_LR_SCHEDULES] == VALID_LR_SCHEDULES
    assert (lr_schedules.WARMUP_LOG_RATE, lr_schedules.WARMUP_LINEAR_RATE) == ("log", "linear")
    constants = "CYCLE_MIN_MOM DECAY_STEP_SIZE TOTAL_NUM_STEPS COS_MIN_RATIO WARMUP_MIN_RATIO LR_RANGE_TEST_MIN_LR"
    assert all(getattr(lr_schedules, name) == name.lower() for name in constants.split())


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_command_line_to_schedule(name):
    parser = add_tuning_arguments(argparse.ArgumentParser())
    args = parser.parse_args(
        ["--lr_schedule", name, "--total_num_steps", "50", "--warmup_num_steps", "5", "--cycle_max_lr", "0.3",
         "--lr_range_test_staircase", "--cycle_momentum", "false"]
    )  # fmt: skip
    config, problem = get_config_from_args(args)
    assert problem is None and config["type"] == name
    getattr(lr_schedules, name)(adam(), **config["params"])
    if name == "OneCycle":
        assert config["params"]["cycle_momentum"] is False and get_lr_from_config(config) == (0.3, "")
    if name == "LRRangeTest":
        assert config["params"]["lr_range_test_staircase"] is True and get_lr_from_config(config) == (0.001, "")
    if name == "WarmupLR":
        assert config["params"]["warmup_num_steps"] == 5 and get_lr_from_config(config) == (0.001, "")


def test_command_line_without_or_with_an_unknown_schedule():
    parser = add_tuning_arguments(argparse.ArgumentParser())
    assert get_config_from_args(parser.parse_args([])) == (None, "--lr_schedule not specified on command line")
    config, problem = get_config_from_args(parser.parse_args(["--lr_schedule", "Cubic"]))
    assert config is None and "Cubic is not a known LR schedule" in problem
    assert get_lr_from_config({"params": {}})[0] is None
    assert get_lr_from_config({"type": "OneCycle", "params": {}}) == (
        None, "cycle_max_lr of OneCycle not defined in config",
    )  # fmt: skip
