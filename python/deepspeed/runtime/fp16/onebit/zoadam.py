"""Import path that existing scripts use."""

from deepspeed.ops.onebit.zoadam import ZeroOneAdam  # noqa: F401
