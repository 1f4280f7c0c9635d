"""Import path of existing scripts."""

from deepspeed.engine.sparse_tensor import SparseTensor  # noqa: F401
