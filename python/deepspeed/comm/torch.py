"""The one backend of ``deepspeed.comm``, as an object whose methods are the verbs. Functions do not go through it."""

import importlib

import torch
import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import group_communicators as communicators
from deepspeed.comm import mesh
from deepspeed.comm.backend import Backend
from deepspeed.comm.collectives import VERBS
from deepspeed.comm.reduce_op import ReduceOp


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

    # ---- verbs whose arguments have other names or defaults than those of the functions ------------------------------
    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        return VERBS["all_reduce"](tensor, op, group, async_op)

    def all_reduce_coalesced(self, tensors, op=dist.ReduceOp.SUM, group=None, async_op=False):
        return VERBS["all_reduce_coalesced"](tensors, op, group, async_op)

    def inference_all_reduce(self, tensor, op, group=None):
        return VERBS["all_reduce"](tensor, op, group)

    def reduce_scatter_tensor(self, output_tensor, input_tensor, op=ReduceOp.SUM, group=None, async_op=False):
        return VERBS["reduce_scatter_tensor"](output_tensor, input_tensor, op, group, async_op)

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        return VERBS["all_gather_into_tensor"](output_tensor, input_tensor, group, async_op)

    all_gather_base = all_gather_into_tensor

    def all_to_all_single(
        self, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        return VERBS["all_to_all_single"](output, input, output_split_sizes, input_split_sizes, group, async_op)

    # ---- groups --------------------------------------------------------------------------------------------------
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


for _name, _function in VERBS.items():
    if not hasattr(TorchBackend, _name):
        setattr(TorchBackend, _name, staticmethod(_function))
