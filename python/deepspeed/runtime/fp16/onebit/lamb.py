"""Import path that existing scripts use."""

from deepspeed.ops.onebit.lamb import OnebitLamb  # noqa: F401
