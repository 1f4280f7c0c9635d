"""MiCS: shards over small groups of ranks, with copies between the groups.

Gathers stay within a group; gradients are reduced within it and then between the holders of the same shard. Source:
Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud" (VLDB 2022), section 3.
"""

from deepspeed import comm as dist
from deepspeed.config.getters import resolved_sections
from deepspeed.zero.init_context import Init


def shard_groups(size, group=None):
    """``(shard group, replica group)`` of this rank: runs of ``size`` consecutive ranks of ``group`` (default: all).

    Every rank of the job calls it. Raises ValueError when ``size`` does not divide the ranks.
    """
    count = dist.get_world_size(group)
    ranks = [dist.get_global_rank(group, rank) for rank in range(count)] if group is not None else list(range(count))
    if size < 1 or len(ranks) % size != 0:
        raise ValueError(
            f"zero_optimization.mics_shard_size {size} does not divide the {len(ranks)} data-parallel ranks; use one "
            f"of {', '.join(str(n) for n in range(1, len(ranks) + 1) if len(ranks) % n == 0)}"
        )
    me = dist.get_rank()
    shard = replica = None
    for begin in range(0, len(ranks), size):
        members = ranks[begin : begin + size]
        made = dist.new_group(members)
        shard = made if me in members else shard
    for index in range(size):
        members = ranks[index::size]
        made = dist.new_group(members)
        replica = made if me in members else replica
    return shard, replica


class MiCS_Init(Init):
    """``zero.Init`` for MiCS: parameters are sharded over groups of ``zero_optimization.mics_shard_size`` ranks."""

    def __init__(
        self,
        module=None,
        data_parallel_group=None,
        sequence_data_parallel_group=None,
        mem_efficient_linear=True,
        remote_device=None,
        pin_memory=False,
        config_dict_or_path=None,
        config=None,
        enabled=True,
        dtype=None,
        mpu=None,
    ):
        if enabled:
            found = config_dict_or_path if config_dict_or_path is not None else config
            assert found is not None, "MiCS_Init needs config_dict_or_path with zero_optimization.mics_shard_size"
            if not dist.is_initialized():
                dist.init_distributed()
            size = resolved_sections(found, ["zero_optimization"])["zero_optimization"]["mics_shard_size"]
            if size < 1:
                raise ValueError("MiCS_Init needs zero_optimization.mics_shard_size above 0 in its configuration")
            group = sequence_data_parallel_group or data_parallel_group
            group = group or (mpu.get_data_parallel_group() if mpu is not None else None)
            data_parallel_group, _ = shard_groups(size, group)
        super().__init__(
            module=module,
            data_parallel_group=data_parallel_group,
            mem_efficient_linear=mem_efficient_linear,
            remote_device=remote_device,
            pin_memory=pin_memory,
            config_dict_or_path=config_dict_or_path if config_dict_or_path is not None else config,
            enabled=enabled,
            dtype=dtype,
        )

    @property
    def num_partitions(self):
        """Ranks that share one copy of the model."""
        return self.access.world
