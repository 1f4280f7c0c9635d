"""Attention over some blocks of keys: modules, patterns of blocks, and products and softmax of such blocks."""

from deepspeed.ops.sparse_attention.bert_sparse_self_attention import BertSparseSelfAttention
from deepspeed.ops.sparse_attention.matmul import MatMul
from deepspeed.ops.sparse_attention.softmax import Softmax
from deepspeed.ops.sparse_attention.sparse_attention_utils import SparseAttentionUtils
from deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from deepspeed.ops.sparse_attention.sparsity_config import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from deepspeed.ops.sparse_attention.unchanged import explain, sparsify

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "MatMul",
    "Softmax",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "explain",
    "sparsify",
]
