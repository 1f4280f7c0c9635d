"""The op ``utils``: many tensors as one, and back."""

import torch


def flatten(tensors):
    """One contiguous 1-D tensor with the elements of ``tensors`` in order; they have one dtype and device."""
    return torch._C._nn.flatten_dense_tensors(list(tensors))


def unflatten(flat, tensors):
    """Views of the 1-D tensor ``flat`` with the shapes of ``tensors``."""
    return torch._C._nn.unflatten_dense_tensors(flat, list(tensors))
