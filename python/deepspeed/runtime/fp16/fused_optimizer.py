"""Import path that existing scripts use."""

from deepspeed.zero.fp16_optimizer import FP16_Optimizer  # noqa: F401
