"""The op ``sparse_attn``: attention over some blocks of keys, and products and softmax of such blocks."""

from deepspeed.ops.attention import KeyBlocks, attention
from deepspeed.ops.sparse_attention.matmul import MatMul
from deepspeed.ops.sparse_attention.softmax import Softmax

__all__ = ["KeyBlocks", "MatMul", "Softmax", "attention"]
