"""MiCS: shards over small groups of ranks, with copies between the groups.

Gathers stay within a group; gradients are reduced within it and then between the holders of the same shard. Source:
Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud" (VLDB 2022), section 3.
"""

from deepspeed import comm as dist
from deepspeed.comm.mesh_views import EngineRanks, adopted, cut_for_mics
from deepspeed.config.getters import resolved_sections
from deepspeed.zero.parameters.init_context import Init


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
            group = group or (EngineRanks(mpu).dp_group if mpu is not None else None)
            data_parallel_group = cut_for_mics(adopted(group or dist.get_world_group()), size)
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
