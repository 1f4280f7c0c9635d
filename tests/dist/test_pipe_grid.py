"""PipelineParallelGrid: an mpu with stages, copies and slices."""

from deepspeed import comm as dist
from deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)
from harness import on_ranks
from refusals import refused
from runs import total


@on_ranks(4, init=True)
def test_stages_and_copies(rank, world):
    for grid in (PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=2)), PipelineParallelGrid()):
        assert grid._is_grid_valid() and grid.topology().dims == [2, 2] and grid.get_global_rank() == rank
        assert (grid.get_stage_id(), grid.get_data_parallel_id()) == divmod(rank, 2)
        assert grid.is_first_stage == (rank < 2) and grid.is_last_stage == (rank >= 2)
        assert grid.pp_group == [rank % 2, rank % 2 + 2] and grid.dp_group == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert total(grid.get_pipe_parallel_group(), rank) == sum(grid.pp_group)
        assert total(grid.get_data_parallel_group(), rank) == sum(grid.get_data_parallel_group_ranks())
        assert grid.get_model_parallel_group() is grid.get_pipe_parallel_group() is grid.ds_model_proc_group
        assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (rank // 2, 2)
        assert (grid.get_slice_parallel_rank(), grid.get_tensor_model_parallel_world_size()) == (0, 1)
        assert total(grid.get_slice_parallel_group(), rank) == rank
        assert grid.pipe_groups == [[0, 2], [1, 3]] and grid.dp_groups == [[0, 1], [2, 3]]
        assert grid.p2p_groups == [[0, 2], [1, 3], [2, 0], [3, 1]]
        assert [grid.stage_to_global(stage_id=1, data=copy) for copy in (0, 1)] == [2, 3]
        assert grid.stage_to_global(stage_id=0) == rank % 2


@on_ranks(4, init=True)
def test_three_axes(rank, world):
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    assert grid.slice_group == [rank // 2 * 2, rank // 2 * 2 + 1] and grid.pp_group == [rank % 2, rank % 2 + 2]
    assert total(grid.get_tensor_model_parallel_group(), rank) == sum(grid.slice_group)
    assert total(grid.get_model_parallel_group(), rank) == 6 and grid.get_model_parallel_rank() == rank
    assert grid.get_data_parallel_world_size() == 1 and grid.get_tensor_model_parallel_rank() == rank % 2


@on_ranks(3, init=True)
def test_ranks_of_a_group(rank, world):
    half = dist.new_group([1, 2])
    if rank == 0:
        return
    grid = PipelineParallelGrid(PipeDataParallelTopology(2, 1), process_group=half)
    assert grid.get_stage_id() == grid.get_global_rank() == rank - 1 and grid.pp_group == [1, 2]
    assert grid.stage_to_global(1) == 2 and total(grid.get_pipe_parallel_group(), rank) == 3
    refused(
        ValueError,
        r"PipeDataParallelTopology\(pipe=3, data=1\) has 3 ranks, but there are 2",
        PipelineParallelGrid,
        PipeDataParallelTopology(3, 1),
        process_group=half,
    )
