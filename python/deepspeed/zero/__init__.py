"""The Python side of the engine core: what optimizers and users see of the flat buffers."""
