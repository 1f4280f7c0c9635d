"""Training with layers that ranks share (``tensor_parallel.autotp_size``) against one plain process."""

from unittest import mock

import pytest

import deepspeed
from cases import Case, over
from claims import equals_plain
from deepspeed.module_inject import vocab_logits
from deepspeed.module_inject.layers import VocabParallelEmbedding, VocabParallelLinear
from deepspeed.zero.parameters.sharded_parameter import is_sharded
from harness import on_ranks
from programs import LANGUAGE_MODELS
from tensor_models import WORDS


@over("stage", "accumulate", dtype=["fp32", "bf16"], world=[2, 3, 4], name=list(LANGUAGE_MODELS), cover="pairs")
@on_ranks()
def test_equals_one_process(rank, world, name, stage, dtype, accumulate):
    equals_plain(rank, name, Case(stage, world, dtype, accumulate, tensor=world))


@over(
    "stage",
    "accumulate",
    world=[2, 3],
    name=["llama", "llama, tied", "gpt2, tied", "t5"],
    backend=["torch", "liger"],
    cover="pairs",
)
@on_ranks()
def test_a_vocabulary_that_is_cut(rank, world, name, stage, accumulate, backend):
    split = {"vocab_parallel_lm_head": True, "vocab_parallel_ce_backend": backend}
    case = Case(stage, world, accumulate=accumulate, tensor=world, split=split)
    with mock.patch.object(vocab_logits, "_whole", None):  # no rank gets the logits of all words
        engine = equals_plain(rank, name, case)
    head = engine.module.lm_head
    assert isinstance(head, VocabParallelLinear)
    assert head.words.stop - head.words.start < WORDS
    read = engine.module.get_input_embeddings()
    assert isinstance(read, VocabParallelEmbedding) and (read.weight is head.weight) is ("tied" in name)


@over(
    "stage",
    "accumulate",
    world=[2, 3],
    name=["llama", "gpt2", "t5", "llama, tied"],
    vocabulary=[False, True],
    cover="pairs",
)
@on_ranks()
def test_sequences_that_are_split_between_blocks(rank, world, name, stage, accumulate, vocabulary):
    split = {"split_sequence": True, "vocab_parallel_lm_head": vocabulary}
    equals_plain(rank, name, Case(stage, world, accumulate=accumulate, tensor=world, split=split))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(4)
def test_two_groups_see_different_data(rank, world, stage):
    equals_plain(rank, "llama", Case(stage, world, accumulate=2, tensor=2))


@on_ranks(2)
def test_a_model_of_zero_init(rank, world):
    case = Case(3, world, tensor=2)
    model = LANGUAGE_MODELS["llama"].make()
    deepspeed.zero.Init(model, config_dict_or_path=case.config(LANGUAGE_MODELS["llama"]))
    assert all(is_sharded(param) for param in model.parameters())
    equals_plain(rank, "llama", case, model)
