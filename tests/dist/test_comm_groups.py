"""deepspeed.utils.groups without an mpu: tensor, sequence, expert groups and those of ZeRO++."""

import types

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.module_inject.auto_ep_folding import build_folding_spec
from deepspeed.utils import groups
from harness import on_ranks
from refusals import refused
from runs import total


def members(group):
    return dist.get_all_ranks_from_group(group)


def _tensor(rank, world):
    data, tensor = groups._init_tp_mesh_device(2)
    neighbour = rank ^ 1
    assert members(tensor) == sorted([rank, neighbour]) and total(tensor, rank) == rank + neighbour
    assert members(data) == [rank % 2, rank % 2 + 2] == groups._get_data_parallel_group_ranks()
    assert groups.get_data_parallel_group() is data and groups.get_tensor_model_parallel_group() is tensor
    assert (groups.get_tensor_model_parallel_world_size(), groups.get_tensor_model_parallel_rank()) == (2, rank % 2)
    assert (groups.get_model_parallel_world_size(), groups.get_model_parallel_rank()) == (2, rank % 2)
    assert groups.get_tensor_model_parallel_src_rank() == rank - rank % 2
    assert (groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()) == (2, rank // 2)
    assert groups._create_model_parallel(2) == (data, tensor)  # made once
    groups.clear()
    refused(ValueError, "3 does not divide the 4 ranks: use one of 1, 2, 4", groups._init_tp_mesh_device, 3)
    refused(ValueError, "leave data_parallel_size out, or give 2", groups._init_tp_mesh_device, 2, 4)
    assert groups.get_data_parallel_world_size() == 4


def _sequence(rank, world):
    assert members(groups._get_sequence_parallel_group()) == [rank]
    group = groups._create_sequence_parallel(2)
    assert members(group) == [rank - rank % 2, rank - rank % 2 + 1]
    assert groups._get_sequence_parallel_group() is group
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (2, rank % 2)
    assert members(groups.get_data_parallel_group()) == [rank % 2, rank % 2 + 2]
    assert members(groups._get_sequence_data_parallel_group()) == [0, 1, 2, 3]
    assert groups._get_sequence_data_parallel_world_size() == 4 and groups._get_sequence_data_parallel_rank() == rank
    groups.clear()
    if hasattr(torch.distributed, "init_device_mesh"):
        groups._use_mesh(dist.initialize_mesh_device((2, 2), ("data_parallel", "sequence_parallel")))
        assert (groups._get_sequence_parallel_world_size(), groups.get_data_parallel_world_size()) == (2, 2)
        refused(
            ValueError,
            "'data_parallel', 'sequence_parallel' are needed",
            groups._use_mesh,
            dist.initialize_mesh_device((2, 2), ("a", "b")),
        )


def _experts(rank, world):
    groups.initialize(ep_size=2)
    groups._create_expert_and_data_parallel(4)
    group = groups._get_expert_parallel_group("ep_size_2")
    pair = [rank - rank % 2, rank - rank % 2 + 1]
    assert members(group) == pair == groups._get_expert_parallel_group_ranks("ep_size_2")
    assert total(group, rank) == sum(pair)
    assert groups._get_expert_parallel_world_size("ep_size_2") == 2
    assert groups._get_expert_parallel_rank("ep_size_2") == rank % 2
    assert groups._get_expert_parallel_src_rank("ep_size_2") == pair[0]
    same = [rank % 2, rank % 2 + 2]
    assert members(groups._get_expert_data_parallel_group("ep_size_2")) == same
    assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == same
    assert groups._get_expert_data_parallel_world_size("ep_size_2") == 2
    assert groups._get_expert_data_parallel_rank("ep_size_2") == rank // 2
    assert groups._get_max_expert_size() == 4 and groups._get_max_expert_size_name() == "ep_size_4"
    assert members(groups._get_max_expert_parallel_group()) == [0, 1, 2, 3]
    assert members(groups._get_expert_data_parallel_group("ep_size_4")) == [rank]
    assert list(groups._get_expert_parallel_group_dict()) == ["ep_size_2", "ep_size_4"]
    assert list(groups._get_expert_data_parallel_group_dict()) == ["ep_size_2", "ep_size_4"]
    assert groups._get_expert_model_parallel_world_size() == 1
    groups._create_expert_and_data_parallel(2)  # made once
    assert groups._get_expert_parallel_group("ep_size_2") is group
    groups.clear()
    groups._create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]
    assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == pair
    groups.clear()
    refused(
        ValueError,
        "expert_parallel_size 4 does not divide the 2 data-parallel ranks",
        groups._create_expert_and_data_parallel,
        4,
        mp_size=2,
    )
    spec = build_folding_spec(world_size=4, pp_size=1, tp_size=2, ep_size=4)
    refused(ValueError, "_size_ is 2.*says 4", groups._create_expert_and_data_parallel, 2, folding_spec=spec)
    refused(ValueError, "mp_size is 4", groups._create_expert_and_data_parallel, 4, mp_size=4, folding_spec=spec)
    refused(ValueError, "neighbours", groups._create_expert_and_data_parallel, 4,
            use_data_before_expert_parallel_=True, folding_spec=spec)  # fmt: skip
    groups._create_expert_and_data_parallel(4, mp_size=2, folding_spec=spec)
    assert groups._get_expert_parallel_group_ranks("ep_size_4") == [0, 1, 2, 3]
    assert groups._get_expert_data_parallel_group_ranks("ep_size_4") == [rank]
    groups.clear()
    refused(ValueError, "mp_mode", groups._create_expert_and_data_parallel, 2, mp_mode="pp")
    refused(RuntimeError, "no expert groups yet", groups._get_max_expert_size)
    groups._create_expert_and_data_parallel(2, mp_size=2)
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]


def _split_experts(rank, world):
    mpu = types.SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2)
    groups._create_expert_data_and_model_parallel(2, mpu)
    assert groups._get_expert_model_parallel_world_size() == 2
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]
    groups.clear()
    assert groups._get_expert_model_parallel_world_size() == 1
    refused(ValueError, "neither", groups._create_expert_data_and_model_parallel, 2, object())


def _secondary(rank, world):
    assert not groups._zero_param_parallel_is_initialized()
    assert groups._get_zero_param_intra_parallel_group() is None
    group = groups._create_zero_param_parallel_group(2)
    pair = [rank - rank % 2, rank - rank % 2 + 1]
    assert groups._zero_param_parallel_is_initialized() and groups._get_zero_param_intra_parallel_group() is group
    assert groups._get_zero_param_intra_parallel_group_ranks() == pair == members(group)
    assert groups._get_zero_param_intra_parallel_rank_in_mygroup() == rank % 2
    assert groups._get_zero_param_intra_parallel_group_world_size() == 2
    groups.clear()
    refused(ValueError, "zero_hpz_partition_size 3", groups._create_zero_param_parallel_group, 3)


@pytest.mark.parametrize("body", [_tensor, _sequence, _experts, _split_experts, _secondary])
@on_ranks(4, init="gloo")
def test_groups(rank, world, body):
    groups.clear()
    body(rank, world)
    groups.clear()
    dist.barrier()  # rank 0 has the store in which members of other groups may still meet


def test_lists_of_experts():
    lists = groups._get_expert_parallel_ranks
    assert lists(16, 2, 4) == (
        [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]],
        [[0, 8], [2, 10], [4, 12], [6, 14], [1, 9], [3, 11], [5, 13], [7, 15]],
    )
    assert lists(16, 2, 4, 2) == (
        [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
        [[0], [2], [4], [6], [1], [3], [5], [7], [8], [10], [12], [14], [9], [11], [13], [15]],
    )
    assert lists(8, 1, 4, 1, True) == ([[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]])
    refused(ValueError, "pipeline_parallel_size 3 does not divide the 16 ranks", lists, 16, 2, 4, 3)
    for world, tensor, expert, pipe in ((16, 2, 4, 2), (24, 2, 3, 2), (8, 1, 8, 1)):
        for first in (False, True):
            for kind in lists(world, tensor, expert, pipe, first):
                assert sorted(rank for ranks in kind for rank in ranks) == list(range(world))


@on_ranks(2, init="gloo")
def test_groups_end_with_their_job(rank, world, folder):
    """Groups of a job that has ended are not those of the next one."""
    groups.clear()
    first = groups._create_zero_param_parallel_group(2)
    dist.destroy_process_group()
    dist.init_distributed("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=world)
    assert not groups._zero_param_parallel_is_initialized()
    second = groups._create_zero_param_parallel_group(1)
    assert members(second) == [rank] and second is not first
    groups.clear()
