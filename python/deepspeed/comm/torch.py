"""The one backend of ``deepspeed.comm``: native communicators over the groups of torch.distributed."""

import importlib

import torch
import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import group_communicators as communicators
from deepspeed.comm import mesh
from deepspeed.comm.backend import Backend
from deepspeed.comm.reduce_op import ReduceOp, to_torch


class _Joined:
    """A handle for several."""

    def __init__(self, works):
        self._works = works

    def wait(self, timeout=None):
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self):
        return all(work.is_completed() for work in self._works)


def _all_of(works, async_op):
    joined = _Joined([work for work in works if work is not None])
    if not async_op:
        joined.wait()
    return joined if async_op else None


class TorchBackend(Backend):
    """Creates torch's default process group, or takes over the one that exists.

    Args:
        backend: torch.distributed's name: gloo, nccl, mpi, ...
        timeout: ``timedelta`` that a collective may wait for the other ranks.
        init_method: as for ``torch.distributed.init_process_group``; None is ``env://``.
        rank, world_size: -1 to read them from the environment.
    """

    def __init__(self, backend, timeout, init_method, rank=-1, world_size=-1, name="torch"):
        super().__init__(name=name)
        if not dist.is_initialized():
            self.init_process_group(backend, timeout, init_method, rank, world_size)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @classmethod
    def get_all_gather_function(cls):
        """torch's own function that gathers into one tensor."""
        return getattr(dist, "all_gather_into_tensor", None) or dist._all_gather_base

    @classmethod
    def get_reduce_scatter_function(cls):
        """torch's own function that reduces and scatters one tensor."""
        return getattr(dist, "reduce_scatter_tensor", None) or dist._reduce_scatter_base

    def has_all_gather_into_tensor(self):
        return True

    def has_reduce_scatter_tensor(self):
        return True

    def init_process_group(self, backend, timeout, init_method, rank, world_size):
        numbering = getattr(dist.distributed_c10d, "_world", None)  # torch 2.x
        before = getattr(numbering, "group_count", None)
        try:
            dist.init_process_group(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)
            communicators.add_memory(dist.group.WORLD)
        except Exception:
            # torch numbers the group before it meets the others and keeps the number when that fails: the rank that
            # tries again would look for the group "1" of a store in which the others wait as "0", for ever.
            if before is not None and not dist.is_initialized():
                numbering.group_count = before
            raise

    def is_initialized(self):
        return dist.is_initialized()

    # ---- reductions ----------------------------------------------------------------------------------------------
    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if ours := communicators.of(group, tensor, op):
            return ours.run("all_reduce", [], [tensor], async_op, op)
        return dist.all_reduce(tensor, to_torch(op, tensor.dtype), group=group, async_op=async_op)

    def inference_all_reduce(self, tensor, op, group=None):
        return self.all_reduce(tensor, op, group, False)

    def all_reduce_coalesced(self, tensors, op=dist.ReduceOp.SUM, group=None, async_op=False):
        return _all_of([self.all_reduce(tensor, op, group, True) for tensor in tensors], async_op)

    def reduce(self, tensor, dst, op=ReduceOp.SUM, group=None, async_op=False):
        if ours := communicators.of(group, tensor, op):
            return ours.run("reduce", [], [tensor], async_op, op, communicators.rank_in(group, dst))
        return dist.reduce(tensor, dst, to_torch(op, tensor.dtype), group=group, async_op=async_op)

    def reduce_scatter(self, output, input_list, op=ReduceOp.SUM, group=None, async_op=False):
        if ours := communicators.of(group, output, op, input_list):
            return ours.run("reduce_scatter", input_list, [output], async_op, op)
        return dist.reduce_scatter(output, input_list, to_torch(op, output.dtype), group=group, async_op=async_op)

    def reduce_scatter_tensor(self, output_tensor, input_tensor, op=ReduceOp.SUM, group=None, async_op=False):
        if ours := communicators.of(group, output_tensor, op):
            return ours.run("reduce_scatter", [input_tensor], [output_tensor], async_op, op)
        op = to_torch(op, output_tensor.dtype)
        return self.get_reduce_scatter_function()(output_tensor, input_tensor, op, group=group, async_op=async_op)

    # ---- data movement -------------------------------------------------------------------------------------------
    def broadcast(self, tensor, src, group=None, async_op=False):
        if ours := communicators.of(group, tensor):
            return ours.run("broadcast", [], [tensor], async_op, root=communicators.rank_in(group, src))
        return dist.broadcast(tensor, src, group=group, async_op=async_op)

    def broadcast_object_list(self, object_list, src, group=None, device=None):
        return dist.broadcast_object_list(object_list, src=src, group=group, device=device)

    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        if ours := communicators.of(group, tensor, parts=tensor_list):
            return ours.run("all_gather", [tensor], tensor_list, async_op)
        return dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        if ours := communicators.of(group, output_tensor):
            return ours.run("all_gather", [input_tensor], [output_tensor], async_op)
        return self.get_all_gather_function()(output_tensor, input_tensor, group=group, async_op=async_op)

    def all_gather_base(self, output_tensor, input_tensor, group=None, async_op=False):
        return self.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

    def all_gather_coalesced(self, output_tensors, input_tensors, group=None, async_op=False):
        if len(output_tensors) != len(input_tensors):
            raise ValueError(
                f"all_gather_coalesced got {len(output_tensors)} outputs for {len(input_tensors)} inputs; "
                f"it needs one output tensor per input tensor."
            )
        pairs = zip(output_tensors, input_tensors, strict=True)
        return _all_of([self.all_gather_into_tensor(*pair, group, True) for pair in pairs], async_op)

    def all_gather_object(self, object_list, obj, group=None):
        return dist.all_gather_object(object_list, obj, group=group)

    def all_to_all_single(
        self, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        communicator = communicators.of(group, output)
        if communicator is None:
            return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)
        splits = (input_split_sizes, output_split_sizes)
        return communicator.run("all_to_all", [input], [output], async_op, splits=splits)

    def all_to_all(self, output_tensor_list, input_tensor_list, group=None, async_op=False):
        if ours := communicators.of(group, output_tensor_list[0]):
            return ours.run("all_to_all", input_tensor_list, output_tensor_list, async_op)
        return dist.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)

    def gather(self, tensor, gather_list=None, dst=0, group=None, async_op=False):
        if ours := communicators.of(group, tensor):
            return ours.run("gather", [tensor], gather_list or [], async_op, root=communicators.rank_in(group, dst))
        return dist.gather(tensor, gather_list, dst, group=group, async_op=async_op)

    def scatter(self, tensor, scatter_list=None, src=0, group=None, async_op=False):
        if ours := communicators.of(group, tensor):
            return ours.run("scatter", scatter_list or [], [tensor], async_op, root=communicators.rank_in(group, src))
        return dist.scatter(tensor, scatter_list, src, group=group, async_op=async_op)

    # ---- point to point ------------------------------------------------------------------------------------------
    def send(self, tensor, dst, group=None, tag=0):
        return dist.send(tensor, dst, group=group, tag=tag)

    def recv(self, tensor, src=None, group=None, tag=0):
        return dist.recv(tensor, src, group=group, tag=tag)

    def isend(self, tensor, dst, group=None, tag=0):
        return dist.isend(tensor, dst, group=group, tag=tag)

    def irecv(self, tensor, src=None, group=None, tag=0):
        return dist.irecv(tensor, src, group=group, tag=tag)

    def batch_isend_irecv(self, ops):
        if all(one.tensor.device.type == "cpu" for one in ops):
            start = {True: self.isend, False: self.irecv}
            return [start[one.sends](one.tensor, one.peer, one.group, one.tag) for one in ops]
        start = {True: dist.isend, False: dist.irecv}
        made = [dist.P2POp(start[one.sends], one.tensor, one.peer, one.group, one.tag) for one in ops]
        return dist.batch_isend_irecv(made)

    # ---- meeting points and groups -------------------------------------------------------------------------------
    def barrier(self, group=None, async_op=False, device_ids=None):
        if ours := communicators.of(group, None):
            return ours.run("barrier", [], [], async_op)
        return dist.barrier(group=group, async_op=async_op, device_ids=device_ids)

    def monitored_barrier(self, group=None, timeout=None, wait_all_ranks=False):
        return dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)

    def get_rank(self, group=None):
        return dist.get_rank(group)

    def get_world_size(self, group=None):
        return dist.get_world_size(group)

    def get_backend(self, group=None):
        return dist.get_backend(group)

    def new_group(self, ranks):
        return mesh.new_group(ranks)

    def get_global_rank(self, group, group_rank):
        return group_rank if group in (None, dist.group.WORLD) else dist.get_global_rank(group, group_rank)

    def get_all_ranks_from_group(self, group=None):
        return [self.get_global_rank(group, index) for index in range(dist.get_world_size(group))]

    def get_world_group(self):
        return dist.group.WORLD

    def destroy_process_group(self, group=None):
        communicators.forget(group)
        mesh.forget(group)
        return dist.destroy_process_group(group)

    def init_device_mesh(self, mesh_shape, mesh_dim_names):
        """A torch ``DeviceMesh`` over all ranks; RuntimeError on a torch older than 2.2."""
        accelerator = get_accelerator()
        kind = accelerator._name if self.get_backend() == accelerator.communication_backend_name() else "cpu"
        return mesh.init_device_mesh(kind, mesh_shape, mesh_dim_names)

    def enable_symm_mem_for_group(self, group_name):
        """Lets kernels of this group reach each other's memory; RuntimeError on a torch without symmetric memory."""
        try:
            symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        except ImportError:
            raise RuntimeError(
                f"symmetric memory needs torch 2.5 or later with CUDA, this is {torch.__version__}."
            ) from None
        symmetric.enable_symm_mem_for_group(group_name)
