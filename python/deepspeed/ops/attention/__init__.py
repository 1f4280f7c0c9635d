"""Attention: of whole sequences (``whole``), and of blocks one after the other (``blocks``)."""

from deepspeed.ops.attention.blocks import Dropped
from deepspeed.ops.attention.whole import KeyBlocks, attention

__all__ = ["Dropped", "KeyBlocks", "attention"]
