"""Import path of existing scripts; the code is in deepspeed.zero."""

from deepspeed.zero.errors import ZeRORuntimeException, is_zero_param  # noqa: F401
