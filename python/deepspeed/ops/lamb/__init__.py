"""LAMB over native kernels."""

from deepspeed.ops.from_config import builder_of
from deepspeed.ops.lamb.fused_lamb import FusedLamb

__all__ = ["FusedLamb"]

from_config = builder_of(FusedLamb)
