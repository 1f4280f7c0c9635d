"""Named coordinates of ranks, and what they share: views of the grid in ``csrc/plan/process_grid.h``."""

import functools
import itertools
from collections import namedtuple

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.comm import mesh, mesh_views
from deepspeed.utils.forwarding import answers_from, forwarded

MESH_AXES = {"pipe": "pp", "data": "dp", "sequence": "sp", "model": "tp"}  # axes of topologies -> those of meshes


class ProcessTopology:
    """Ranks 0, 1, 2 ... over ``axes`` of sizes ``dims``, outer to inner: neighbours differ in the last axis.

    ``ProcessTopology(["pipe", "data"], [2, 4]).get_rank(pipe=1, data=0)`` is 4. ``grid``: the native one, whose axes
    have the names of all meshes (``MESH_AXES``).
    """

    def __init__(self, axes, dims):
        self.axes, self.dims = list(axes), [int(dim) for dim in dims]
        if len(self.axes) != len(self.dims) or not all(dim >= 1 for dim in self.dims):
            raise ValueError(f"axes {self.axes} with sizes {self.dims}: give each axis one size of at least 1")
        self.ProcessCoord = namedtuple("ProcessCoord", self.axes)
        coordinates = itertools.product(*(range(dim) for dim in self.dims))
        self.mapping = {self.ProcessCoord(*coordinate): rank for rank, coordinate in enumerate(coordinates)}
        named = [(MESH_AXES.get(axis, axis), dim, axis) for axis, dim in zip(self.axes, self.dims)]
        named += [(own, 1, "") for axis, own in MESH_AXES.items() if axis not in self.axes]
        self.grid = _native._C.ProcessGrid(len(self.mapping), named)

    def _known(self, names):
        wrong = [name for name in names if name not in self.axes]
        if wrong:
            raise ValueError(f"there is no axis {', '.join(wrong)}: the topology has {', '.join(self.axes)}")

    def get_rank(self, **coord_kwargs):
        """The rank at a coordinate of every axis."""
        self._known(coord_kwargs)
        missing = [axis for axis in self.axes if axis not in coord_kwargs]
        if missing:
            raise ValueError(f"get_rank() wants {', '.join(missing)}, too; filter_match() takes some of the axes")
        coordinate = self.ProcessCoord(**coord_kwargs)
        if coordinate not in self.mapping:
            raise ValueError(f"there is no rank at {coordinate}: the sizes are {self.ProcessCoord(*self.dims)}")
        return self.mapping[coordinate]

    def get_axis_names(self):
        """Names, outer to inner."""
        return self.axes

    def get_rank_repr(self, rank, omit_axes=["data", "pipe"], inner_sep="_", outer_sep="-"):  # noqa: B006 (published)
        """``"model_01"``: the coordinates of ``rank`` but those along ``omit_axes``, for names of files."""
        coordinate = self.get_coord(rank)
        kept = [axis for axis in self.axes if axis not in frozenset(omit_axes)]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coordinate, axis):02d}" for axis in kept)

    def get_dim(self, axis):
        """Size of ``axis``; 0 where there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank):
        """Its coordinates, a named tuple."""
        if not 0 <= rank < self.world_size():
            raise ValueError(f"rank {rank} is not in the topology: it has ranks 0 to {self.world_size() - 1}")
        return self._coordinates[rank]

    @functools.cached_property
    def _coordinates(self):
        return list(self.mapping)

    def get_axis_comm_lists(self, axis):
        """Lists of ranks that differ along ``axis`` only; none where there is no such axis."""
        return self.grid.lists([MESH_AXES.get(axis, axis)]) if axis in self.axes else []

    def filter_match(self, **filter_kwargs):
        """Ranks whose coordinates are these."""
        self._known(filter_kwargs)
        wanted = filter_kwargs.items()
        return [rank for at, rank in self.mapping.items() if all(getattr(at, axis) == index for axis, index in wanted)]

    def get_axis_list(self, axis, idx):
        """Ranks at index ``idx`` of ``axis``."""
        return self.filter_match(**{axis: idx})

    def world_size(self):
        """Ranks in all."""
        return len(self.mapping)

    def along(self, axes, rank):
        """Ranks that differ from ``rank`` along ``axes`` only, itself among them; axes that there are not count 1."""
        return self.grid.list([MESH_AXES.get(axis, axis) for axis in axes if axis in self.axes], rank)

    def __str__(self):
        return f"{type(self).__name__}({', '.join(f'{axis}={dim}' for axis, dim in zip(self.axes, self.dims))})"


class PipeDataParallelTopology(ProcessTopology):
    """Stages, and copies of each: gradients are reduced among neighbouring ranks."""

    def __init__(self, num_pp, num_dp):
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, copies, and slices of each layer ("model"): slices are neighbouring ranks."""

    def __init__(self, num_pp, num_mp, num_dp):
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _prime_factors(N):
    """Prime factors of ``N``, ascending: 12 gives [2, 2, 3]."""
    if N <= 0:
        raise ValueError(f"{N} has no prime factors: give a number of at least 1")
    factors, factor = [], 2
    while factor * factor <= N:
        while N % factor == 0:
            factors.append(factor)
            N //= factor
        factor += 1
    return factors + ([N] if N > 1 else [])


def _even_topology(world):
    """Stages and copies from the prime factors of ``world`` in turn."""
    stages = copies = 1
    for turn, prime in enumerate(_prime_factors(world)):
        stages, copies = (stages * prime, copies) if turn % 2 == 0 else (stages, copies * prime)
    return PipeDataParallelTopology(stages, copies)


# Groups of a grid as Megatron's mpu names them: each has a rank, a size and a group.
_GROUPS = {
    "pipe_parallel": "_pipe",
    "data_parallel": "_data",
    "model_parallel": "_model",
    "slice_parallel": "_slice",
    "tensor_model_parallel": "_slice",
    "sequence_parallel": "_sequence",
    "sequence_data_parallel": "_same_weights",  # copies, times the ranks that share sequences
}
_PARTS = {"rank": "rank", "world_size": "size", "group": "group"}


@answers_from(
    {
        **{f"get_{name}_{part}": f"{held}.{at}" for name, held in _GROUPS.items() for part, at in _PARTS.items()},
        "get_pipeline_model_parallel_rank": "_pipe.rank",
        "get_pipeline_model_parallel_world_size": "_pipe.size",
        "get_data_parallel_group_ranks": "_data.ranks",
        "get_data_parallel_id": "data_parallel_id",
        "get_stage_id": "stage_id",
        "get_global_rank": "global_rank",
        "topology": "_topo",
    }
)
class PipelineParallelGrid:
    """The groups of this rank: an ``mpu`` of the ranks of ``process_group`` (None: all) in ``topology`` (None:
    stages and copies by the prime factors of their number).

    "pipe" are the stages of one copy, "data" the copies of one stage, "slice" (or tensor model) the ranks that share a
    layer, and "model" all ranks of one copy. A topology may have an axis "sequence", too: ranks that share sequences.
    Groups are made here, by their members; every rank makes a grid.
    """

    sequence_source = "the topology of the PipelineModule (its axis 'sequence')"  # for errors of the configuration

    def __init__(self, topology=None, process_group=None):
        if not dist.is_initialized():
            raise RuntimeError("a grid of ranks needs a job: call deepspeed.init_distributed() first")
        everybody = process_group is None
        self._ranks = range(dist.get_world_size()) if everybody else dist.get_all_ranks_from_group(process_group)
        self._ranks = list(self._ranks)
        self.world_size = len(self._ranks)
        self.global_rank = self._ranks.index(dist.get_rank())
        self._topo = topology if topology is not None else _even_topology(self.world_size)
        if self._topo.world_size() != self.world_size:
            raise ValueError(
                f"{self._topo} has {self._topo.world_size()} ranks, but there are {self.world_size}: the sizes of its "
                f"axes must multiply to that"
            )
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.slice_parallel_size = self.model_parallel_size = max(self._topo.get_dim("model"), 1)
        self.sequence_parallel_size = max(self._topo.get_dim("sequence"), 1)
        coordinate = self._topo.get_coord(self.global_rank)
        self.stage_id = getattr(coordinate, "pipe", 0)
        self.data_parallel_id = getattr(coordinate, "data", 0)
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        assert self._is_grid_valid(), f"{self._topo}: axes but pipe, data, sequence and model are of size 1"
        # One order on all ranks: inner to outer, then what is made of several.
        self._slice, self._data, self._pipe, self._model, self._sequence, self._same_weights = (
            self._members(*axes)
            for axes in (["model"], ["data"], ["pipe"], ["pipe", "model"], ["sequence"], ["data", "sequence"])
        )

    def _members(self, *axes):
        ranks = [self._ranks[rank] for rank in self._topo.along(axes, self.global_rank)]
        mesh.group_over(ranks)  # now, when all members are here
        return mesh_views.Members(ranks, dist.get_rank())

    def _is_grid_valid(self):
        """Whether the sizes account for all ranks."""
        copies = self.data_parallel_size * self.sequence_parallel_size
        return copies * self.pipe_parallel_size * self.slice_parallel_size == self.world_size

    # Ranks of this rank's groups, and the groups.
    pp_group, pp_proc_group = forwarded("_pipe.ranks", False), forwarded("_pipe.group", False)
    dp_group, dp_proc_group = forwarded("_data.ranks", False), forwarded("_data.group", False)
    slice_group, slice_proc_group = forwarded("_slice.ranks", False), forwarded("_slice.group", False)
    ds_model_proc_group = forwarded("_model.group", False)
    ds_model_rank, ds_model_world_size = forwarded("_model.rank", False), forwarded("_model.size", False)

    def _lists(self, axis):
        return [[self._ranks[rank] for rank in ranks] for ranks in self._topo.get_axis_comm_lists(axis)]

    @property
    def dp_groups(self):
        """Ranks of every data-parallel group."""
        return self._lists("data")

    @property
    def pipe_groups(self):
        """Ranks of every pipeline."""
        return self._lists("pipe")

    @property
    def p2p_groups(self):
        """Each rank and the one of the next stage; the last stage's next is the first."""
        pairs = [[ranks[i], ranks[(i + 1) % len(ranks)]] for ranks in self.pipe_groups for i in range(len(ranks))]
        return sorted(pairs)

    def stage_to_global(self, stage_id, **kwargs):
        """The rank of stage ``stage_id`` whose other coordinates are this rank's, or ``kwargs``."""
        coordinate = self._topo.get_coord(self.global_rank)._asdict()
        return self._ranks[self._topo.get_rank(**{**coordinate, **kwargs, "pipe": stage_id})]
