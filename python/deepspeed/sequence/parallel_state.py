"""Ranks that share sequences, under the names that Megatron's mpu has: pass this module as ``mpu=`` to ``initialize``.

Sequence parallelism is the only dimension beside data parallelism here, and no weight is split: what is called model
parallel are the ranks that share a sequence, and an engine knows that they hold the same weights.
"""

from deepspeed import comm as dist
from deepspeed.comm import mesh_views
from deepspeed.utils import groups


def initialize_sequence_parallel(sequence_parallel_size):
    """Makes groups of ``sequence_parallel_size`` neighbours that share sequences; every rank of the job calls it.

    ValueError where the size does not divide the ranks of the job, or where it has made groups of another size.
    """
    assert dist.is_initialized(), "call deepspeed.init_distributed() before initialize_sequence_parallel()"
    groups._create_sequence_parallel(sequence_parallel_size)


def sequence_parallel_is_initialized():
    return mesh_views.known(groups._SEQUENCE)


def _views(name):
    """``(group, world size, rank)`` getters of the ranks that ``groups`` calls ``name``."""
    return (mesh_views.getter(name, what, "initialize_sequence_parallel(size)") for what in ("group", "size", "rank"))


# The ranks that share a sequence; those that see other data; both: the ranks that hold the same weights.
get_sequence_parallel_group, get_sequence_parallel_world_size, get_sequence_parallel_rank = _views(groups._SEQUENCE)
get_data_parallel_group, get_data_parallel_world_size, get_data_parallel_rank = _views(groups._SEQUENCE_PEERS)
get_sequence_data_parallel_group, get_sequence_data_parallel_world_size, get_sequence_data_parallel_rank = _views(
    groups._SEQUENCE_DATA
)
get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank
