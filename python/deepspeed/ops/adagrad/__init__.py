"""Adagrad whose step is one native call per parameter group."""

from deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adagrad.fused_adagrad import FusedAdagrad
from deepspeed.ops.from_config import builder_of

__all__ = ["DeepSpeedCPUAdagrad", "FusedAdagrad"]

from_config = builder_of(FusedAdagrad)
from_config_on_host = builder_of(DeepSpeedCPUAdagrad)
