"""The Python side of the engine core: what optimizers and users see of the flat buffers."""

from deepspeed.zero.tiling import TiledLinear, TiledLinearReturnBias  # noqa: F401
