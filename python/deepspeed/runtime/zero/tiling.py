"""Import path of existing scripts; the code is in deepspeed.zero."""

from deepspeed.zero.gathers.tiling import TiledLinear, TiledLinearReturnBias  # noqa: F401
