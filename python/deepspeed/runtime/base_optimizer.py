"""Import path that existing scripts use."""

from deepspeed.zero.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer  # noqa: F401
