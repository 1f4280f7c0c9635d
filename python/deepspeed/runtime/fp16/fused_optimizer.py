"""Import path that existing scripts use."""

from deepspeed.published.fp16_optimizer import FP16_Optimizer  # noqa: F401
