"""MiCS: shards over small groups of ranks, with copies between the groups.

Gathers stay within a group; gradients are reduced within it and then between the holders of the same shard. Source:
Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud" (VLDB 2022), section 3.
"""

from deepspeed import comm as dist
from deepspeed.comm.mesh_views import adopted, cut_for_mics
from deepspeed.zero.init.init_context import Init


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
        super().__init__(
            module=module,
            data_parallel_group=data_parallel_group,
            sequence_data_parallel_group=sequence_data_parallel_group,
            mpu=mpu,
            mem_efficient_linear=mem_efficient_linear,
            remote_device=remote_device,
            pin_memory=pin_memory,
            config_dict_or_path=config_dict_or_path if config_dict_or_path is not None else config,
            enabled=enabled,
            dtype=dtype,
        )

    def _sharing_ranks(self, group, zero):
        assert zero is not None, "MiCS_Init needs config_dict_or_path with zero_optimization.mics_shard_size"
        if zero["mics_shard_size"] < 1:
            raise ValueError("MiCS_Init needs zero_optimization.mics_shard_size above 0 in its configuration")
        return cut_for_mics(adopted(group or dist.get_world_group()), zero["mics_shard_size"])
