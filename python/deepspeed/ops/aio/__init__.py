"""``AsyncIOBuilder`` under the path that scripts import."""

from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
