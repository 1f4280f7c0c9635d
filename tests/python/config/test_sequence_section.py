"""The section ``sequence_parallel``: one number of ranks in two places, and what does not go together."""

import pytest

from deepspeed import DeepSpeedConfigError
from deepspeed.config import DeepSpeedConfig
from refusals import refused


def made(world=4, **config):
    return DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config}, world_size=world)


def test_the_size_is_that_of_the_older_key():
    config = made(sequence_parallel={"size": 2})
    assert config.sequence_parallel_size == 2 and config.world_size == 2 and config.train_batch_size == 2
    assert made(sequence_parallel={"size": 2}, sequence_parallel_size=2).sequence_parallel_size == 2
    assert made(sequence_parallel_size=2).sequence_parallel_config is None
    section = made(sequence_parallel={}).sequence_parallel_config
    assert (section.method, section.chunk, section.offload, section.tile_mlp) == ("auto", 0, "none", False)
    assert made(sequence_parallel={"tile_mlp": ["a.b"]}).sequence_parallel_config.tile_mlp == ["a.b"]


@pytest.mark.parametrize(
    "config, words",
    [
        ({"sequence_parallel": {"size": 2}, "sequence_parallel_size": 4}, "name one number of ranks"),
        ({"sequence_parallel": {"size": 3}}, "does not divide the 4 ranks"),
        ({"sequence_parallel": {"size": 0}}, "size"),
        ({"sequence_parallel": {"method": "star"}}, "ulysses"),
        ({"sequence_parallel": {"offload": "file"}}, "Set sequence_parallel.folder"),
        ({"sequence_parallel": {"chunk": 8, "method": "ring"}}, "or leave chunk out"),
        ({"sequence_parallel": {"chunks": 8}}, "chunk"),
    ],
)
def test_what_is_wrong_is_named(config, words):
    refused(DeepSpeedConfigError, words, made, **config)


def test_a_folder_that_nobody_reads():
    assert any("has no effect unless offload" in text for text in made(sequence_parallel={"folder": "/a"}).warnings)
