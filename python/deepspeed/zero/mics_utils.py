"""Groups of ranks of MiCS, for scripts that make them by themselves."""

from collections import namedtuple

from deepspeed import comm as dist
from deepspeed.comm import mesh
from deepspeed.comm.mesh_views import REPLICAS, adopted, cut_for_mics

# The group, size and rank of the ranks that share one copy of a model, and of those with the same shard elsewhere.
MiCS_CommGroups = namedtuple(
    "MiCS_CommGroups",
    "param_shard_group param_shard_size param_shard_rank param_repli_group param_repli_size param_repli_rank",
    defaults=(None, -1, -1, None, -1, -1),
)


def scale_tensors(tensors, scale):
    """Multiplies each of ``tensors`` by ``scale`` in place."""
    for tensor in tensors:
        tensor.mul_(scale)


def create_mics_comm_groups(shard_size, dp_group, hierarchical_allgather=False, mpu=None):
    """Splits ``dp_group`` into runs of ``shard_size`` ranks. All its ranks call it. Returns ``MiCS_CommGroups``.

    Raises:
        NotImplementedError: ``hierarchical_allgather``, which is not in this build yet.
    """
    if hierarchical_allgather:
        raise NotImplementedError(
            "create_mics_comm_groups: hierarchical_allgather is not in this build yet: leave it out"
        )
    native = adopted(dp_group if dp_group is not None else dist.get_world_group())
    shards = cut_for_mics(native, shard_size)
    copies = mesh.group_over(native.ranks(REPLICAS))
    return MiCS_CommGroups(
        shards, dist.get_world_size(shards), dist.get_rank(shards),
        copies, dist.get_world_size(copies), dist.get_rank(copies),
    )  # fmt: skip
