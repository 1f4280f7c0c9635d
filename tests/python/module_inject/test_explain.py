"""``explain``: the table of a cut as text."""

import pytest

import tensor_models
from deepspeed.module_inject import explain
from refusals import refused


def told(name, ranks, **section):
    return explain(tensor_models.model_of(name), {"tensor_parallel": {"autotp_size": ranks, **section}})


@pytest.mark.parametrize("name, bias", [("llama", 0), ("gpt2", 6 * 48 + 4 * 48)])
def test_bytes_are_those_of_the_slices(name, bias, capsys):
    text = told(name, 2)
    assert capsys.readouterr().out == f"{text}\n"
    model = tensor_models.model_of(name)
    blocks = sum(param.numel() for param in model.blocks.parameters() if param.dim() > 1)
    rest = sum(param.numel() for param in model.parameters()) - blocks
    whole = rest if name == "llama" else rest - 2 * (3 * 48 + 4 * 48) // 2
    assert f"rank 1: {4 * (blocks // 2 + whole):,} bytes" in text


def test_the_table_names_dimensions_widths_copies_reasons_and_all_reduces():
    text = told("llama", 4)
    assert "blocks.0 (LlamaBlock, 2 alike)" in text
    assert "self_attn.o_proj.weight: dimension 1, 48 elements are [16, 8, 16, 8]" in text
    assert "self_attn.k_proj.weight: dimension 0, 16 elements are [8, 8, 8, 8], some on several ranks" in text
    assert "all-reduces: 2 forward, 2 backward" in text
    assert "all-reduces: 3 forward, 4 backward" in told("t5", 2)  # the cross attention reads two tensors
    assert "dense: whole, ranks share some heads of 'query_key_value'" in told("falcon", 2)


def test_rules_are_in_the_table():
    rules = {"layer_specs": [{"patterns": [".*down_proj.weight"], "partition_type": "row"}]}
    text = told("llama", 2, partition_config=rules)
    assert "as tensor_parallel.partition_config says" in text and "mlp.down_proj: cut by a rule, row" in text
    assert "self_attn.q_proj: whole, tensor_parallel.partition_config leaves it whole" in text


def test_one_rank_is_refused():
    refused(ValueError, "autotp_size is 1, so nothing is cut", told, "llama", 1)
