"""compute_elastic_config against the rule as plain loops, its errors, and the sizes that the engine takes."""

import itertools
import math
import random

import pytest

import deepspeed
from deepspeed.config import DeepSpeedConfig
from deepspeed.elasticity import compute_elastic_config, elasticity, is_torch_elastic_compatible
from deepspeed.elasticity.config import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize
from refusals import refused

PUBLISHED = {
    "enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32,
    "max_gpus": 1500, "min_time": 20, "version": 0.1,
}  # fmt: skip
VERSION = deepspeed.__version__


def config(**changes):
    return {"elasticity": {**PUBLISHED, **changes}}


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    for name in ("WORLD_SIZE", "DEEPSPEED_ELASTICITY_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_the_published_example():
    batch, worlds = compute_elastic_config(ds_config=config(), target_deepspeed_version=VERSION)
    assert (batch, len(worlds)) == (9792, 23)
    assert all(any(batch % (world * micro) == 0 for micro in PUBLISHED["micro_batch_sizes"]) for world in worlds)
    assert compute_elastic_config(config(), VERSION, world_size=64) == (9792, worlds, 17)
    assert elasticity.compute_elastic_config is compute_elastic_config and is_torch_elastic_compatible() is True


def test_no_batch_is_above_the_largest():
    """The least common multiple of the micro batch sizes (42; 120) is no choice where it is above the largest batch."""
    small = config(max_train_batch_size=32, micro_batch_sizes=[1, 2, 3, 7], min_gpus=1)
    assert compute_elastic_config(small, VERSION, world_size=4) == (24, [1, 2, 3, 4, 6, 8, 12, 24], 3)
    refused(
        ElasticityIncompatibleWorldSize,
        "7 ranks cannot share the train batch size 24",
        compute_elastic_config,
        small,
        VERSION,
        world_size=7,
    )
    round_ones = config(max_train_batch_size=100, micro_batch_sizes=[8, 10, 12], min_gpus=1)
    assert compute_elastic_config(round_ones, VERSION) == (96, [1, 2, 3, 4, 6, 8, 12])


# ---- the rule, slowly -----------------------------------------------------------------------------------------------
def divisors(number):
    return sum(1 for d in range(1, number + 1) if number % d == 0)


COMPOSITE = []
for _number in range(1, 2600):
    if not COMPOSITE or divisors(_number) > divisors(COMPOSITE[-1]):
        COMPOSITE.append(_number)


def slowly(section):
    most, micros = section["max_train_batch_size"], section["micro_batch_sizes"]
    found = []
    for base in [*micros, math.lcm(*micros)]:
        if base > most:
            continue
        batch = base * max(one for one in COMPOSITE if one <= most // base)
        worlds = [
            world
            for world in range(section["min_gpus"], section["max_gpus"] + 1)
            if any(batch % (micro * world) == 0 for micro in micros)
        ]
        found.append((len(worlds), batch if section["prefer_larger_batch"] else -batch, batch, worlds))
    return max(found)[2:]


def test_every_small_section():
    """All sets of up to three micro batch sizes up to 5, with every largest batch up to 16."""
    for count in (1, 2, 3):
        for micros in itertools.combinations(range(1, 6), count):
            for most in range(micros[-1], 17):
                section = {
                    "enabled": True, "max_train_batch_size": most, "micro_batch_sizes": list(micros), "min_gpus": 1,
                    "max_gpus": 16, "prefer_larger_batch": bool(most % 2), "version": 0.1,
                }  # fmt: skip
                assert compute_elastic_config({"elasticity": section}, VERSION) == slowly(section)
                assert slowly(section)[0] <= most


@pytest.mark.parametrize("block", range(5))
def test_random_sections(block):
    for seed in range(100 * block, 100 * block + 100):
        compare(seed)


def compare(seed):
    numbers = random.Random(seed)
    low = numbers.randint(1, 16)
    section = {
        "enabled": True,
        "max_train_batch_size": numbers.randint(40, 2500),
        "micro_batch_sizes": [numbers.randint(1, 40) for _ in range(numbers.randint(1, 5))],
        "min_gpus": low,
        "max_gpus": low + numbers.randint(0, 300),
        "prefer_larger_batch": numbers.random() < 0.5,
        "version": 0.1,
    }
    batch, worlds = slowly(section)
    if not worlds:
        refused(ElasticityConfigError, "min_gpus", compute_elastic_config, {"elasticity": section}, VERSION)
        return
    assert compute_elastic_config({"elasticity": section}, VERSION) == (batch, worlds)
    world = numbers.choice(worlds)
    micro = max(one for one in section["micro_batch_sizes"] if batch % (one * world) == 0)
    assert compute_elastic_config({"elasticity": section}, VERSION, world_size=world)[2] == micro


# ---- errors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changes, kind, words",
    [
        ({"enabled": False}, ElasticityConfigError, "not enabled"),
        ({"version": 0.3}, ElasticityError, "0.1, 0.2"),
        ({"version": "0.3"}, ElasticityError, "version"),
        ({"micro_batch_sizes": [1, 4, -1, 2, -10]}, ElasticityConfigError, "at least 1"),
        ({"micro_batch_sizes": 5}, ElasticityConfigError, "list"),
        ({"micro_batch_sizes": []}, ElasticityConfigError, "must not be empty. Name at least one"),
        ({"max_train_batch_size": 0}, ElasticityConfigError, "must be greater than 0"),
        ({"micro_batch_sizes": ["a", None, 0.5]}, ElasticityConfigError, "micro_batch_sizes"),
        ({"micro_batch_sizes": [2, 0.5, 4]}, ElasticityConfigError, "micro_batch_sizes"),
        ({"micro_batch_sizes": [8, 20000]}, ValueError, "20000 is larger than 10000"),
        ({"min_gpus": -1}, ElasticityConfigError, "min_gpus"),
        ({"max_gpus": -1}, ElasticityConfigError, "max_gpus"),
        ({"min_gpus": 2000}, ElasticityConfigError, "fewest"),
        ({"model_parallel_size": 4, "num_gpus_per_node": 8}, ElasticityConfigError, "0.2"),
        ({"min_gpus": 10**6, "max_gpus": 10**7}, ElasticityConfigError, "nearest numbers that can"),
    ],
)
def test_refused_sections(changes, kind, words):
    error = refused(kind, words, compute_elastic_config, config(**changes), VERSION)
    assert isinstance(error, ElasticityError) and "is required" not in str(error)  # what is there but wrong


def test_what_is_missing():
    refused(ElasticityConfigError, "has no section", compute_elastic_config, {"train_batch_size": 4}, VERSION)
    refused(ValueError, "takes the dict", compute_elastic_config, "ds.json", VERSION)
    for key in ("max_train_batch_size", "micro_batch_sizes"):
        section = {name: value for name, value in PUBLISHED.items() if name != key}
        refused(ElasticityConfigError, key, compute_elastic_config, {"elasticity": section}, VERSION)
    refused(ElasticityConfigError, "WORLD_SIZE", compute_elastic_config, config(), VERSION, return_microbatch=True)
    refused(ElasticityConfigError, "world_size is -4", compute_elastic_config, config(), VERSION, world_size=-4)


@pytest.mark.parametrize("target, fits", [("0.2", False), ("0.3.7", False), ("0.3.8", True), ("0.19.6+abc", True)])
def test_versions_that_know_no_elasticity(target, fits):
    if fits:
        assert compute_elastic_config(config(), target)[0] == 9792
    else:
        refused(ElasticityError, "0.3.8", compute_elastic_config, config(), target)
    refused(ElasticityError, "'new' is none", compute_elastic_config, config(), "new")


def test_a_world_that_does_not_fit_names_the_nearest():
    refused(
        ElasticityIncompatibleWorldSize,
        "128 ranks.*nearest numbers that can are 102 and 136",
        compute_elastic_config,
        config(),
        VERSION,
        world_size=128,
    )


# ---- version 0.2 ----------------------------------------------------------------------------------------------------
def test_version_2_needs_the_number_of_ranks(monkeypatch):
    nodes = config(version=0.2, min_gpus=8, num_gpus_per_node=8, model_parallel_size=4)
    refused(ElasticityConfigError, "WORLD_SIZE", compute_elastic_config, nodes, VERSION)
    monkeypatch.setenv("WORLD_SIZE", "16")
    batch, worlds = compute_elastic_config(nodes, VERSION)
    assert 4 in worlds and all(world % 2 == 0 for world in worlds) and batch <= 10000
    assert compute_elastic_config(nodes, VERSION, return_microbatch=True) == (batch, worlds, 16)
    assert compute_elastic_config(nodes, VERSION, world_size=16) == (batch, worlds, 16)
    refused(
        ElasticityError,
        "divisible by model_parallel_size",
        compute_elastic_config,
        config(version=0.2, num_gpus_per_node=8, model_parallel_size=16),
        VERSION,
    )
    refused(
        ElasticityIncompatibleWorldSize, "nearest are 16 and 24", compute_elastic_config, nodes, VERSION, world_size=20
    )


def test_version_2_outside_the_list_is_warned_about(capsys):
    odd = config(version=0.2, min_gpus=1, micro_batch_sizes=[8, 12, 16])
    batch, worlds, micro = compute_elastic_config(odd, VERSION, world_size=101)
    assert (worlds, batch % (101 * micro), batch <= 10000) == ([101], 0, True)
    assert "will differ" in "".join(capsys.readouterr())
    refused(ElasticityIncompatibleWorldSize, "fewer ranks", compute_elastic_config, odd, VERSION, world_size=1300)


# ---- the engine's configuration -------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [32, 34, 64, 136])
def test_the_engine_takes_the_sizes(world):
    made = DeepSpeedConfig(config(), world_size=world)
    micro = compute_elastic_config(config(), VERSION, world_size=world)[2]
    assert (made.train_batch_size, made.train_micro_batch_size_per_gpu) == (9792, micro)
    assert made.gradient_accumulation_steps == 9792 // (micro * world)
    assert "section elasticity" in made.native.explain()


def test_the_engine_refuses_other_worlds():
    refused(
        ElasticityIncompatibleWorldSize,
        "nearest numbers that can are 102 and 136",
        DeepSpeedConfig,
        config(),
        world_size=128,
    )
    given = {"train_batch_size": 7, **config(ignore_non_elastic_batch_info=True)}
    assert DeepSpeedConfig(given, world_size=64).train_batch_size == 9792
