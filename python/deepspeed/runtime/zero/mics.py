"""Import path of existing scripts; the code is in deepspeed.zero."""

from deepspeed.zero.init.mics import MiCS_Init  # noqa: F401
