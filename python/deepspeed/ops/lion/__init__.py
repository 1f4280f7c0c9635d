"""Lion whose step is one native call per parameter group."""

from deepspeed.ops.from_config import builder_of
from deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from deepspeed.ops.lion.fused_lion import FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]

from_config = builder_of(FusedLion)
from_config_on_host = builder_of(DeepSpeedCPULion)
