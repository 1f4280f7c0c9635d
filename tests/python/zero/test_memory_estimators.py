"""Memory estimates against the published example, T5-3B on one node of eight GPUs, and against the formulas."""

import pytest
import torch

from deepspeed.zero.offload.memory_estimators import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from refusals import refused

T5_3B, T5_LAYER = 2851598336, 32899072


def test_table_of_stage_2(capsys):
    estimate_zero2_model_states_mem_needs_all_cold(T5_3B, num_gpus_per_node=8, num_nodes=1)
    assert capsys.readouterr().out.splitlines() == [
        "Estimated memory needed for params, optim states and gradients for a:",
        "HW: Setup with 1 node, 8 GPUs per node.",
        "SW: Model with 2851M total params.",
        "  per CPU  |  per GPU |   Options",
        "  127.48GB |   5.31GB | offload_optimizer=cpu ",
        "  127.48GB |  15.93GB | offload_optimizer=none",
    ]


def test_table_of_stage_3(capsys):
    estimate_zero3_model_states_mem_needs_all_cold(T5_3B, T5_LAYER, num_gpus_per_node=8, num_nodes=1)
    assert capsys.readouterr().out.splitlines() == [
        "Estimated memory needed for params, optim states and gradients for a:",
        "HW: Setup with 1 node, 8 GPUs per node.",
        "SW: Model with 2851M total params, 32M largest layer params.",
        "  per CPU  |  per GPU |   Options",
        "   71.71GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1",
        "  127.48GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0",
        "   63.74GB |   0.79GB | offload_param=none, offload_optimizer=cpu , zero_init=1",
        "  127.48GB |   0.79GB | offload_param=none, offload_optimizer=cpu , zero_init=0",
        "    1.47GB |   6.10GB | offload_param=none, offload_optimizer=none, zero_init=1",
        "  127.48GB |   6.10GB | offload_param=none, offload_optimizer=none, zero_init=0",
    ]


@pytest.mark.parametrize("gpus, nodes", [(1, 1), (8, 1), (4, 3)])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_formulas(gpus, nodes, factor):
    p, layer, world = 12345678, 1234567, gpus * nodes
    assert estimate_zero2_model_states_mem_needs(p, gpus, nodes, False, factor) == (
        int(p * 4 * gpus * factor),
        4 * p + int(16 * p / world),
    )
    assert estimate_zero2_model_states_mem_needs(p, gpus, nodes, True, factor) == (
        int(p * max(4 * world, 16) * factor),
        2 * p,
    )
    expected = {
        (True, True, True): (int(p * 18 // nodes * factor), 4 * layer),
        (True, True, False): (int(max(p * 4 * gpus, p * 18 // nodes) * factor), 4 * layer),
        (True, False, True): (int(p * 16 // nodes * factor), 4 * layer + int(2 * p / world)),
        (True, False, False): (int(max(p * 4 * gpus, p * 16 // nodes) * factor), 4 * layer + int(2 * p / world)),
        (False, False, True): (int(layer * 4 * gpus * factor), 4 * layer + int(18 * p / world)),
        (False, False, False): (int(p * 4 * gpus * factor), 4 * layer + int(18 * p / world)),
    }
    for (offload, offload_params, init), needs in expected.items():
        got = estimate_zero3_model_states_mem_needs(p, layer, gpus, nodes, offload, offload_params, init, factor)
        assert got == (*needs, 4 * layer)


def test_a_live_model_is_counted_once(capsys):
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 1000), torch.nn.Linear(1000, 1000), torch.nn.Linear(10, 10))
    model[1].weight = model[0].weight  # tied
    estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=2, num_nodes=3)
    assert "3 nodes, 2 GPUs per node" in (out := capsys.readouterr().out) and "Model with 1M total" in out
    estimate_zero3_model_states_mem_needs_all_live(model)
    assert "1M total params, 1M largest layer params" in (out := capsys.readouterr().out)
    assert "1 node, 1 GPU per node" in out


def test_sizes_that_cannot_be_are_refused():
    refused(ValueError, "ranks per node", estimate_zero2_model_states_mem_needs, 1, num_gpus_per_node=0)
    refused(ValueError, "nodes", estimate_zero3_model_states_mem_needs, 1, 1, num_nodes=0)
