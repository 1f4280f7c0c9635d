"""``PinMemoryBuilder`` under the path that scripts import."""

from deepspeed.ops.op_builder import PinMemoryBuilder

__all__ = ["PinMemoryBuilder"]
