"""Import path that existing scripts use; the code is in deepspeed.config."""

from deepspeed.config.sections import TPTrainingConfig  # noqa: F401
