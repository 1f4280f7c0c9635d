"""``ALL_OPS`` under the path that scripts import: {name of the op: a builder}."""

from deepspeed.ops.op_builder import ALL_OPS

__all__ = ["ALL_OPS"]
