"""Drop-in for ``torch.distributed``: the same functions, with the backend chosen by the accelerator, the ranks found
under any launcher, and gloo's missing dtypes and collectives filled in. Names that are not here are torch's own.
"""

import torch.distributed as _torch_distributed

from deepspeed.comm import shm as _shm
from deepspeed.comm.caller import get_caller_func
from deepspeed.comm.collectives import (
    P2POp,
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    allgather_fn,
    barrier,
    batch_isend_irecv,
    broadcast,
    broadcast_object_list,
    gather,
    inference_all_reduce,
    irecv,
    isend,
    monitored_barrier,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_fn,
    reduce_scatter_tensor,
    scatter,
    send,
)
from deepspeed.comm.comms_log import (
    configure,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    log_summary,
    reset_log,
    write_summary,
)
from deepspeed.comm.process_group import (
    ProcessGroup,
    destroy_process_group,
    enable_symm_mem_for_group,
    get_all_ranks_from_group,
    get_global_rank,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    has_all_gather_into_tensor,
    has_all_reduce_coalesced,
    has_coalescing_manager,
    has_reduce_scatter_tensor,
    init_deepspeed_backend,
    init_distributed,
    initialize_mesh_device,
    is_available,
    is_initialized,
    new_group,
    set_backend,
)
from deepspeed.comm.reduce_op import ReduceOp
from deepspeed.comm.rendezvous import (
    in_aml,
    in_aws_sm,
    in_dlts,
    mpi_discovery,
    patch_aml_env_for_torch_nccl_backend,
    patch_aws_sm_env_for_torch_nccl_backend,
)
from deepspeed.comm.timed import timed_op
from deepspeed.comm.torch import TorchBackend
from deepspeed.comm.utils import (
    get_debug_log_name,
    get_default_args,
    get_local_rank_from_launcher,
    get_msg_size_from_args,
    get_tensor_kwarg,
    get_tensor_position,
    get_world_rank_from_launcher,
    get_world_size_from_launcher,
)
from deepspeed.comm.watch import flight_record
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from deepspeed.registry import lazy_package as _lazy_package

__all__ = [name for name in dir() if not name.startswith("_")]


# Scripts that replaced `import torch.distributed as dist` also use names we have nothing to add to.
__getattr__, __dir__ = _lazy_package(__name__, otherwise=lambda name: getattr(_torch_distributed, name))


_shm.register()
