"""Adam and AdamW whose step is one native call per parameter group."""

from deepspeed.ops.adam.adam8bit import Adam8bit
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["Adam8bit", "DeepSpeedCPUAdam", "FusedAdam"]
