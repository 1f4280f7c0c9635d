"""The ranks of a pipeline's engine: copies of this stage, stages, slices, and the channel between stages."""

import functools
import os

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.comm import mesh, mesh_views
from deepspeed.comm.mesh_views import EngineMesh, Purpose
from deepspeed.comm.timeouts import default_timeout
from deepspeed.comm.watch import board_store, group_facts


class PipelineMesh(EngineMesh):
    """Those of ``grid``, a ``PipelineParallelGrid``. Norms go over all stages and slices of a copy."""

    def __init__(self, grid):
        super().__init__(grid)
        self.grid = grid
        self.mp_world_size, self.mp_rank = grid.get_model_parallel_world_size(), grid.get_model_parallel_rank()
        self.mp_group = grid.get_model_parallel_group() if self.mp_world_size > 1 else None

    @functools.cached_property
    def mesh(self):
        """The native one: the grid of the topology."""
        return mesh_views.numbered(self.grid.topology().grid, self.grid._ranks, self.grid.ds_model_proc_group)

    def copied_along(self, param):
        """Tied weights are copied along the stages, parameters that no attribute calls split along the slices."""
        if getattr(param, "ds_pipe_replicated", False):
            return "pp"
        return "" if self.grid.get_slice_parallel_rank() == 0 else super().copied_along(param)

    def channel(self, device, shape):
        """The native ``PipeChannel`` of this stage with the others; None where it is the only one. ``shape``: where the
        parts of the model are (``PipelineModule.pipe_shape``)."""
        if self.grid.pipe_parallel_size == 1:
            return None
        notes = str(device) if dist.get_backend() == "nccl" and os.environ.get("DS_NCCL_DIRECT") == "0" else "cpu"
        stages = self.mesh.ranks(["pp"])

        def open_edge(grads, start, end):
            purpose = Purpose.PIPE_GRADS if grads else Purpose.PIPE
            return mesh_views.over(self.mesh, [stages[start], stages[end]], purpose)

        return _native._C.PipeChannel(
            activations=self.mesh.communicator(["pp"], Purpose.PIPE),
            grads=self.mesh.communicator(["pp"], Purpose.PIPE_GRADS),
            shape=shape,
            open_edge=open_edge,
            devices=(str(device), notes),
            bound=_native._C.pipe.SEND_BOUND,
            timeout=default_timeout(),
        )

    def over(self, ranks):
        """A native communicator of these ranks, this one among them."""
        return mesh_views.over(self.mesh, ranks, Purpose.CONTROL)

    def error_propagation(self, channel, groups, instructions, layers):
        """The native ``ErrorPropagation`` of all ranks of the grid, which ends their waits in ``channel`` and
        ``groups``; None for one rank, and where the others do not exist (a planned step).
        ``instructions``, ``layers``: names for the positions that ranks report."""
        grid = self.grid
        if grid.world_size == 1 or mesh.made_here().planned:
            return None
        names = [f"stage {getattr(grid.topology().get_coord(rank), 'pipe', 0)}, rank {grid._ranks[rank]}"
                 for rank in range(grid.world_size)]  # fmt: skip
        agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun; else rank 0 has it
        made = f"pipelines/{'_'.join(map(str, grid._ranks))}"
        number = board_store(made).add(f"rank{grid.global_rank}", 1)  # the n-th of each rank is one
        return _native._C.ErrorPropagation(
            store=board_store(f"{made}/{number}"),
            rank=grid.global_rank,
            names=names,
            channel=channel if isinstance(channel, _native._C.PipeChannel) else None,
            groups=groups,
            facts=group_facts("pipeline"),
            position_names=(instructions, layers),
            keeper=grid._ranks.index(0) if 0 in grid._ranks and not agents_store else -1,
        )


class NoChannel:
    """The channel of a pipeline with one stage, which sends nothing."""

    failed = ""
    sent = (0, 0)

    def abort(self, why):
        pass

    def begin(self, trains):
        pass

    def settle(self):
        pass
