"""Import path that existing scripts use."""

from deepspeed.zero.optimizers.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer  # noqa: F401
