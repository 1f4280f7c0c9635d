"""Gradients of embeddings: a few rows of a large matrix."""

import torch


class SparseTensor:
    """The non-zero rows of a 2-D tensor: ``indices`` (int64, may repeat), ``values`` (one row each), ``dense_size``.

    dense_tensor: dense, or a torch COO tensor that is sparse in its first dimension; None makes an empty object whose
    attributes the caller sets.
    """

    def __init__(self, dense_tensor=None):
        self.orig_dense_tensor = dense_tensor
        self.indices = self.values = self.dense_size = None
        if dense_tensor is None:
            return
        if dense_tensor.is_sparse:
            dense_tensor = dense_tensor.coalesce()
            if dense_tensor.sparse_dim() != 1:
                raise ValueError(
                    f"SparseTensor holds whole rows, but this one is sparse in {dense_tensor.sparse_dim()} dimensions."
                )
            self.indices = dense_tensor.indices().flatten()
            self.values = dense_tensor.values()
        else:
            if dense_tensor.dim() != 2:
                raise ValueError(f"SparseTensor needs a 2-D tensor, got the shape {list(dense_tensor.shape)}.")
            self.indices = (dense_tensor != 0).any(dim=1).nonzero().flatten()
            self.values = dense_tensor[self.indices]
        self.dense_size = list(dense_tensor.size())

    def to_coo_tensor(self):
        """A torch COO tensor; rows that repeat add up."""
        return torch.sparse_coo_tensor(self.indices.unsqueeze(0), self.values, self.dense_size)

    @staticmethod
    def type():
        return "deepspeed.SparseTensor"

    def to_dense(self):
        """The full tensor; rows that repeat add up."""
        dense = torch.zeros(self.dense_size, dtype=self.values.dtype, device=self.values.device)
        return dense.index_add_(0, self.indices, self.values)

    def sparse_size(self):
        """(elements of indices and values, elements of the dense tensor)."""
        return self.indices.numel() + self.values.numel(), self.dense_size[0] * self.dense_size[1]

    def add(self, b):
        """Adds another one of the same dense size, in place: its rows are appended."""
        if self.dense_size != b.dense_size:
            raise ValueError(f"cannot add sparse tensors of the sizes {self.dense_size} and {b.dense_size}.")
        self.indices = torch.cat([self.indices, b.indices])
        self.values = torch.cat([self.values, b.values])

    def __str__(self):
        sparse, dense = self.sparse_size()
        return (
            f"DeepSpeed.SparseTensor(indices_size={list(self.indices.size())}, values_size={list(self.values.size())}, "
            f"dense_size={self.dense_size}, device={self.indices.device}, reduction_factor={dense / max(1, sparse)})"
        )

    __repr__ = __str__
