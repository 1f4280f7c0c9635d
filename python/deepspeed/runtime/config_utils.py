"""Import path that existing scripts use; the code is in deepspeed.config."""

from deepspeed.config import DeepSpeedConfigModel  # noqa: F401
