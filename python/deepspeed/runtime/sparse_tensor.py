"""Import path of existing scripts."""

from deepspeed.utils.sparse_tensor import SparseTensor  # noqa: F401
