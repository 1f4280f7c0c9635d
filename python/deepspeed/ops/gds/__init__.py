"""``GDSBuilder`` under the path that scripts import."""

from deepspeed.ops.op_builder import GDSBuilder

__all__ = ["GDSBuilder"]
