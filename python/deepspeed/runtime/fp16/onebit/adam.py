"""Import path that existing scripts use."""

from deepspeed.ops.onebit.adam import OnebitAdam  # noqa: F401
