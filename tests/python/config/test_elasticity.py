"""The section elasticity: its exceptions, the scheduler's copy of it, and the number of ranks."""

import json
import pickle

import pytest

import deepspeed.elasticity
from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, cli
from deepspeed.config.errors import config_error
from deepspeed.elasticity import elasticity_enabled, ensure_immutable_elastic_config
from deepspeed.elasticity.config import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize
from deepspeed.elasticity.constants import DEEPSPEED_ELASTICITY_CONFIG, MIN_GPUS, MIN_GPUS_DEFAULT
from deepspeed.host.launcher_messages import SOCKET_VARIABLE, tell_launcher
from deepspeed.launcher.rank_messages import RankMessages
from refusals import refused

SECTION = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 2, "max_gpus": 8}


def wrong(config, kind, words, **where):
    error = refused(kind, words, DeepSpeedConfig, config, **where)
    assert isinstance(error, DeepSpeedConfigError) and isinstance(error, ElasticityError)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, kind) and str(again) == str(error)


def sizes_of(config):
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


def test_names():
    assert (deepspeed.elasticity.ELASTICITY, deepspeed.elasticity.ENABLED) == ("elasticity", "enabled")
    assert deepspeed.elasticity.ENABLED_DEFAULT is False
    assert (MIN_GPUS, MIN_GPUS_DEFAULT) == ("min_gpus", 1)
    assert issubclass(ElasticityConfigError, ElasticityError)
    assert issubclass(ElasticityIncompatibleWorldSize, ElasticityError)
    assert elasticity_enabled({"elasticity": SECTION}) is True
    assert elasticity_enabled({"elasticity": {"enabled": False}}) is elasticity_enabled({}) is False


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_batch_keys_beside_it(key):
    words = f"{key} = 8, elasticity.enabled = true: elastic training chooses the batch sizes"
    wrong({key: 8, "elasticity": SECTION}, ElasticityConfigError, words, world_size=2)
    config = DeepSpeedConfig({key: 8, "elasticity": {**SECTION, "ignore_non_elastic_batch_info": True}}, world_size=2)
    assert sizes_of(config) == (1680, 6, 140)


@pytest.mark.parametrize(
    "section, words",
    [
        ({"enabled": True, "micro_batch_sizes": [2]}, "max_train_batch_size"),
        ({"enabled": True, "max_train_batch_size": 20}, "micro_batch_sizes"),
        ({**SECTION, "micro_batch_sizes": 2}, "must be a list"),
        ({**SECTION, "micro_batch_sizes": [2, 0]}, r"item 2 \(0\) must be at least 1"),
        ({**SECTION, "min_gpus": 9}, "most ranks are fewer than the fewest"),
        ({**SECTION, "min_gpu": 1}, 'Did you mean "min_gpus"'),
        ({**SECTION, "version": 0.3}, "0.1, 0.2"),
    ],
)
def test_what_is_wrong_in_the_section(section, words):
    wrong({"elasticity": section}, ElasticityConfigError, words, world_size=2)


@pytest.mark.parametrize("ranks, fits", [(1, False), (2, True), (8, True), (9, False)])
def test_the_number_of_ranks(ranks, fits, monkeypatch):
    words = rf"min_gpus = 2, elasticity.max_gpus = 8: there are {ranks} ranks \(the environment variable WORLD_SIZE\)"
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    if not fits:
        return wrong({"elasticity": SECTION}, ElasticityIncompatibleWorldSize, words)
    train, micro, accumulation = sizes_of(DeepSpeedConfig({"elasticity": SECTION}))
    assert train == micro * accumulation * ranks and micro in SECTION["micro_batch_sizes"]


@pytest.mark.parametrize("version", [0.1, 0.2])
def test_an_unknown_number_of_ranks_is_not_judged(version, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = DeepSpeedConfig({"elasticity": {**SECTION, "version": version}})
    assert config.train_batch_size == (1680 if version == 0.1 else None)
    assert config.train_micro_batch_size_per_gpu is None


def test_the_scheduler_must_agree(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(DEEPSPEED_ELASTICITY_CONFIG, json.dumps({**SECTION, "max_train_batch_size": 1000}))
    words = "elasticity.max_train_batch_size = 2000 here and 1000 there"
    wrong({"elasticity": SECTION}, ElasticityConfigError, words, world_size=2)
    refused(ElasticityConfigError, words, ensure_immutable_elastic_config, SECTION)
    (tmp_path / "ds.json").write_text(json.dumps({"elasticity": SECTION}))
    assert cli.main(["explain", str(tmp_path / "ds.json"), "--world", "2"]) == 1
    assert words in capsys.readouterr().out.split("Conflicts")[1]
    DeepSpeedConfig({"train_batch_size": 8, "elasticity": {**SECTION, "enabled": False}})  # off: nothing to agree on

    monkeypatch.setenv(DEEPSPEED_ELASTICITY_CONFIG, json.dumps({**SECTION, "min_time": 20}))
    ensure_immutable_elastic_config(SECTION)  # how often it changes does not matter to the sizes
    refused(ElasticityConfigError, "min_gpus", ensure_immutable_elastic_config, {**SECTION, "min_gpus": 3})


@pytest.mark.parametrize("text", ["{", "[1]", "7", '{"enabled": true, "micro_batch_size": [1]}'])
def test_what_the_scheduler_wrote_is_wrong(text, monkeypatch):
    monkeypatch.setenv(DEEPSPEED_ELASTICITY_CONFIG, text)
    refused(ElasticityConfigError, DEEPSPEED_ELASTICITY_CONFIG, ensure_immutable_elastic_config, SECTION)
    wrong({"elasticity": SECTION}, ElasticityConfigError, DEEPSPEED_ELASTICITY_CONFIG, world_size=2)


def test_without_a_scheduler_there_is_a_warning(monkeypatch, capsys):
    monkeypatch.delenv(DEEPSPEED_ELASTICITY_CONFIG, raising=False)
    ensure_immutable_elastic_config(SECTION)
    text = "".join(capsys.readouterr())
    assert DEEPSPEED_ELASTICITY_CONFIG in text and "WARNING" in text


def test_all_kinds_of_errors_go_together():
    kinds = [AssertionError, NotImplementedError, ElasticityConfigError, ElasticityIncompatibleWorldSize]
    error = config_error("text", ["a.b"], kinds)
    assert all(isinstance(error, kind) for kind in [*kinds, DeepSpeedConfigError, ValueError])
    assert str(error) == "text"


def test_a_launcher_hears_which_numbers_of_ranks_fit(monkeypatch):
    """Also where those at hand do not."""
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    assert not tell_launcher(saved="here")
    launcher = RankMessages()
    monkeypatch.setenv(SOCKET_VARIABLE, launcher.name)
    small = {**SECTION, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2, 4], "min_gpus": 1}
    wrong({"elasticity": {**small, "version": 0.1}}, ElasticityIncompatibleWorldSize, "3 ranks cannot", world_size=3)
    assert launcher.read() == [{"worlds": [1, 2, 4, 8], "min_time": 0}]
    wrong({"elasticity": {**small, "version": 0.1}}, ElasticityIncompatibleWorldSize, "Start 1 to 8", world_size=9)
    assert launcher.read() == [{"worlds": [1, 2, 4, 8], "min_time": 0}]
    nodes = {**small, "max_train_batch_size": 16, "max_gpus": 16, "num_gpus_per_node": 4, "min_time": 5}
    DeepSpeedConfig({"elasticity": nodes}, world_size=8)
    assert launcher.read() == [{"worlds": [4, 8, 16], "min_time": 5}]
    monkeypatch.setenv(SOCKET_VARIABLE, "deepspeed-that-is-gone")
    assert not tell_launcher(saved="here")


def test_steps_between_snapshots_without_snapshots_are_refused():
    made = {"train_batch_size": 1, "elasticity": {"snapshot_steps": 5}}
    wrong(made, DeepSpeedConfigError, 'Set "memory_copies" to 1, or leave "snapshot_steps" out')
    made["elasticity"]["memory_copies"] = 2
    wrong(made, DeepSpeedConfigError, "elasticity.memory_copies")
    made["elasticity"]["memory_copies"] = 1
    assert DeepSpeedConfig(made).elasticity_config.snapshot_steps == 5


def test_a_folder_without_a_name_is_refused():
    wrong({"train_batch_size": 1, "elasticity": {"save_on_signal": ""}}, DeepSpeedConfigError, "must not be empty")
