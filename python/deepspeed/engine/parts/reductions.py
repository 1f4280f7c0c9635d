"""Reductions of lists of tensors over data-parallel ranks, for scripts that reduce gradients themselves.

The engine's own gradients do not come this way: the native core reduces them during backward.
"""

import torch

from deepspeed import comm as dist
from deepspeed.engine.members import engine_parts, member
from deepspeed.engine.sparse_tensor import SparseTensor
from deepspeed.utils.runs import runs_of


@engine_parts.add("_reductions")
class Reductions:
    """A part of the engine. ``dp_world_size`` None is the size of ``dp_group``; results are means over the ranks, sums
    with ``gradient_average`` false."""

    def __init__(self, engine):
        self.engine = engine
        self.average = engine._config.gradient_allreduce_op != "sum"

    @property
    @member
    def gradient_average(self):
        """Whether reduced gradients are means over the ranks. False: sums, from the next backward on, on every rank."""
        return self.average

    @gradient_average.setter
    def gradient_average(self, average):
        self.average = bool(average)
        core = self.engine.core
        if core is not None:
            ranks = self.engine.parallel  # those that share a sequence have one loss
            core.set_postscale(1.0 / (core.predivide * (ranks.dp_world_size if average else ranks.sp_world_size)))

    def _mean_over(self, flat, dp_group, dp_world_size):
        """``flat`` becomes its mean over the ranks, communicated in ``communication_data_type`` where that is given."""
        world = dist.get_world_size(group=dp_group) if dp_world_size is None else dp_world_size
        if world == 1:
            return flat
        wire = flat if self.engine._wire_dtype is None else flat.to(self.engine._wire_dtype)
        before = self.engine.gradient_predivide_factor() if self.engine.prescale_gradients() else 1.0
        if before != 1.0:
            wire.div_(before)
        dist.all_reduce(wire, group=dp_group)
        if self.engine.gradient_average:
            wire.mul_(before / world)
        elif before != 1.0:
            wire.mul_(before)
        if wire is not flat:
            flat.copy_(wire)
        return flat

    @member
    @torch.no_grad()
    def allreduce_bucket(self, bucket, dp_group, dp_world_size=None):
        """The tensors of ``bucket`` (one dtype), reduced, end to end in one flat tensor. They stay as they are."""
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        return self._mean_over(flat, dp_group, dp_world_size)

    @member
    @torch.no_grad()
    def allreduce_and_copy(self, small_bucket, dp_group, dp_world_size=None):
        """Reduces the tensors of ``small_bucket`` (one dtype) in place, in one collective."""
        flat = self.engine.allreduce_bucket(small_bucket, dp_group, dp_world_size)
        for tensor, mean in zip(small_bucket, flat.split([tensor.numel() for tensor in small_bucket])):
            tensor.copy_(mean.view_as(tensor))

    @member
    def allreduce_no_retain(self, bucket, dp_group, numel_per_bucket=500000000, dp_world_size=None):
        """Reduces the tensors of ``bucket`` in place, in collectives of at most ``numel_per_bucket`` elements, or of
        one tensor."""
        for small in runs_of(bucket, numel_per_bucket, torch.numel):
            self.engine.allreduce_and_copy(small, dp_group, dp_world_size)

    @member
    def buffered_allreduce_fallback(self, grads=None, elements_per_buffer=500000000):
        """Reduces ``grads``, dense tensors and ``SparseTensor``s, in place over the data-parallel ranks.

        None: what the engine has accumulated; then the same as ``allreduce_gradients``.
        """
        if grads is None:
            self.engine.allreduce_gradients()
            return
        group = self.engine.parallel.dp_group
        if group is None or self.engine.parallel.dp_world_size == 1:
            return
        sparse = [grad for grad in grads if isinstance(grad, SparseTensor)]
        dense = [grad for grad in grads if not isinstance(grad, SparseTensor)]
        for dtype in dict.fromkeys(grad.dtype for grad in dense):
            bucket = [grad for grad in dense if grad.dtype == dtype]
            self.engine.allreduce_no_retain(bucket, group, numel_per_bucket=elements_per_buffer)
        if sparse:
            self.engine.sparse_allreduce_no_retain(sparse, group)

    # ---- sparse gradients ------------------------------------------------------------------------------------------
    @member
    @torch.no_grad()
    def sparse_allreduce_no_retain(self, bucket, dp_group, dp_world_size=None):
        """Reduces the ``SparseTensor``s of ``bucket``; the dense tensors they were made from get the results."""
        for sparse in self.engine.sparse_allreduce_bucket(bucket, dp_group, dp_world_size):
            if sparse.orig_dense_tensor is not None:
                dense = sparse.to_coo_tensor() if sparse.orig_dense_tensor.is_sparse else sparse.to_dense()
                sparse.orig_dense_tensor.copy_(dense)

    @member
    def sparse_allreduce_bucket(self, bucket, dp_group, dp_world_size=None):
        """Each ``SparseTensor`` of ``bucket`` with the rows of all ranks."""
        return [self.engine.sparse_allreduce(sparse, dp_group, dp_world_size) for sparse in bucket]

    @member
    @torch.no_grad()
    def sparse_allreduce(self, sparse, dp_group, dp_world_size=None):
        """``sparse`` with the rows of all ranks, divided by their number; rows that repeat add up where it is used."""
        world = dist.get_world_size(group=dp_group) if dp_world_size is None else dp_world_size
        values = sparse.values
        if self.engine._wire_dtype is not None:
            values = values.to(self.engine._wire_dtype)
        if self.engine.gradient_average:
            values = values / world
        sparse.indices = torch.cat(self.engine.sparse_all_gather(sparse.indices, dp_group))
        sparse.values = torch.cat(self.engine.sparse_all_gather(values, dp_group)).to(sparse.values.dtype)
        return sparse

    @member
    def sparse_all_gather(self, value, dp_group):
        """The tensors of all ranks, one for each; they may differ in their first dimension."""
        rows = torch.tensor([value.shape[0]], dtype=torch.int64, device=value.device)
        counts = [int(count) for count in self.engine.all_gather_scalar(rows, dp_group)]
        padded = value.new_zeros((max(counts), *value.shape[1:]))
        padded[: value.shape[0]] = value
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group=dp_group)
        return [tensor[:count] for tensor, count in zip(gathered, counts, strict=True)]

    @member
    def all_gather_scalar(self, value, dp_group):
        """One tensor for each rank of ``dp_group`` with the rank's ``value`` (a tensor of one element)."""
        gathered = [torch.zeros_like(value) for _ in range(dist.get_world_size(dp_group))]
        dist.all_gather(gathered, value, group=dp_group)
        return gathered
