"""Import path that existing scripts use."""

from deepspeed.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: F401
