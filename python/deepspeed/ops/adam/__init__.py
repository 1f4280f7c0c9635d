"""Adam and AdamW whose step is one native call per parameter group."""

from deepspeed.ops.adam.adam8bit import Adam8bit
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam
from deepspeed.ops.adam.zenflow_cpu_adam import ZenFlowCPUAdam
from deepspeed.ops.adam.zenflow_torch_adam import ZenFlowSelectiveAdamW, ZenFlowSelectiveAdamW_stage3

__all__ = [
    "Adam8bit",
    "DeepSpeedCPUAdam",
    "FusedAdam",
    "ZenFlowCPUAdam",
    "ZenFlowSelectiveAdamW",
    "ZenFlowSelectiveAdamW_stage3",
]
