"""Import path that existing scripts use."""

from deepspeed.zero.stage3 import DeepSpeedZeRoOffload  # noqa: F401
