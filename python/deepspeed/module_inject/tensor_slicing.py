"""Copies this rank's slice of a whole weight or bias into a parameter: what injection policies call."""

import torch

from deepspeed import comm as dist


class ReplaceWithTensorSlicing:
    """Copies slices of whole tensors.

    Args:
        mp_group: the ranks that share a tensor; None: ``mp_size`` neighbours among all ranks share it.
        mp_size: the number of these ranks.
        out_dim, in_dim: the dimensions of a destination's outputs and inputs.
    """

    def __init__(self, mp_group=None, mp_size=1, out_dim=1, in_dim=0):
        if mp_group is not None:
            self.gpu_index = dist.get_rank(group=mp_group)
        else:
            self.gpu_index = dist.get_rank() % mp_size if mp_size > 1 else 0
        self.out_dim, self.in_dim, self.mp_size = out_dim, in_dim, mp_size

    def merge_assert(self, dim1, dim2):
        """AssertionError unless the source's size ``dim1`` is larger than the destination's size ``dim2``."""
        assert dim1 > dim2, (
            f"a source of size {dim1} cannot be sliced for a destination of size {dim2}: slices of several ranks are "
            "never merged. Load the checkpoint on as many ranks as it was saved on, or on more"
        )

    def strided_copy(self, dst, src, num_splits, int8=False, allocate_tensor=False):
        """Like ``copy``, for a source of ``num_splits`` parts side by side in its outputs, each of which is sliced by
        itself: queries, keys and values in one tensor."""
        if src is None:
            return None
        dim, size = self._outputs(dst, src, int8)
        return self._filled(dst, self._slice(src, dim, size, num_splits), src, allocate_tensor)

    def copy(self, dst, src, int8=False, allocate_tensor=False):
        """Copies the slice of ``src`` by which it is larger than ``dst``: of its outputs, its inputs, or a bias.

        Args:
            dst: has the size of the slice, and the values of it afterwards.
            src: the whole tensor, with the inputs of a weight in dimension 0 and its outputs in dimension 1.
            int8: the source has them the other way round, as quantized weights do.
            allocate_tensor: the slice goes to memory of its own, and ``dst`` keeps its values.

        Returns a Parameter without a gradient, in the layout of ``src``; None where ``src`` is None.
        """
        if src is None:
            return None
        dim, size = self._outputs(dst, src, int8)
        if src.dim() == dst.dim() == 2 and src.shape[1 - dim] != dst.shape[self.in_dim]:
            dim, size = 1 - dim, dst.shape[self.in_dim]
        return self._filled(dst, self._slice(src, dim, size, 1), src, allocate_tensor)

    def _outputs(self, dst, src, int8):
        """``(dimension of the source's outputs, number of the destination's)``."""
        if src.dim() == dst.dim() == 2:
            return (0 if int8 else 1), dst.shape[self.out_dim]
        return 0, dst.shape[0]

    def _slice(self, src, dim, size, num_splits):
        """Returns this rank's ``size`` elements of a dimension, equally many of each part, or all elements of a
        dimension of that size."""
        whole = src.shape[dim]
        if whole == size:
            return src.data
        self.merge_assert(whole, size)
        if whole != size * self.mp_size or size % num_splits != 0:
            raise ValueError(
                f"dimension {dim} of a source of shape {tuple(src.shape)} cannot be sliced in {num_splits} parts for "
                f"mp_size={self.mp_size} destinations of size {size}"
            )
        parts = src.data.unflatten(dim, (num_splits, self.mp_size, -1)).select(dim + 1, self.gpu_index)
        return parts.flatten(dim, dim + 1)

    def _filled(self, dst, values, src, allocate_tensor):
        if values.numel() != dst.numel():
            raise ValueError(
                f"a slice of shape {tuple(values.shape)} does not fit a destination of shape {tuple(dst.shape)}: only "
                "its outputs or its inputs may be sliced"
            )
        target = torch.empty_like(dst) if allocate_tensor else dst
        filled = torch.nn.Parameter(target.data.view(values.shape).copy_(values), requires_grad=False)
        if hasattr(src, "scale"):
            filled.scale = src.scale
        return filled
