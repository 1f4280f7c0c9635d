"""Groups of ranks of MiCS, for scripts that make them by themselves."""

from collections import namedtuple

from deepspeed import comm as dist
from deepspeed.comm import mesh
from deepspeed.comm.mesh_views import REPLICAS, adopted, cut_by_host, cut_for_mics

# The group, size and rank of the ranks that share one copy of a model, and of those with the same shard elsewhere. With
# hierarchical gathers, the ranks of the first that share a host, and those with the same place on the other hosts.
MiCS_CommGroups = namedtuple(
    "MiCS_CommGroups",
    "param_shard_group param_shard_size param_shard_rank param_repli_group param_repli_size param_repli_rank "
    "param_intra_node_group param_inter_node_shard_group",
    defaults=(None, -1, -1, None, -1, -1, None, None),
)


def scale_tensors(tensors, scale):
    """Multiplies each of ``tensors`` by ``scale`` in place."""
    for tensor in tensors:
        tensor.mul_(scale)


def create_mics_comm_groups(shard_size, dp_group, hierarchical_allgather=False, mpu=None):
    """Splits ``dp_group`` into runs of ``shard_size`` ranks. All its ranks call it. ``hierarchical_allgather``: splits
    each run by host, too, where it is on several. Returns ``MiCS_CommGroups``."""
    group = dp_group if dp_group is not None else dist.get_world_group()
    native = adopted(group)
    shards = cut_for_mics(native, shard_size)
    copies = mesh.group_over(native.ranks(REPLICAS))
    inner = outer = None
    if hierarchical_allgather:
        inner = cut_by_host(native, group, shard_size)
        outer = None if inner is None else mesh.group_over(native.ranks(["hpz.groups"]))
    return MiCS_CommGroups(
        shards, dist.get_world_size(shards), dist.get_rank(shards),
        copies, dist.get_world_size(copies), dist.get_rank(copies), inner, outer,
    )  # fmt: skip
