"""Import path that existing scripts use: all of ``deepspeed.comm`` in one module."""

from deepspeed.comm import process_group
from deepspeed.comm.collectives import (  # noqa: F401
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
from deepspeed.comm.comms_log import (  # noqa: F401
    comms_logger,
    configure,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    log_summary,
    reset_log,
)
from deepspeed.comm.process_group import (  # noqa: F401
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
from deepspeed.comm.reduce_op import (  # noqa: F401
    ReduceOp,
)
from deepspeed.comm.rendezvous import (  # noqa: F401
    in_aml,
    in_aws_sm,
    in_dlts,
    mpi_discovery,
    patch_aml_env_for_torch_nccl_backend,
    patch_aws_sm_env_for_torch_nccl_backend,
)
from deepspeed.comm.timed import (  # noqa: F401
    timed_op,
)
from deepspeed.comm.torch import (  # noqa: F401
    TorchBackend,
)
from deepspeed.comm.utils import (  # noqa: F401
    get_local_rank_from_launcher,
    get_world_rank_from_launcher,
    get_world_size_from_launcher,
)
from deepspeed.constants import (  # noqa: F401
    TORCH_DISTRIBUTED_DEFAULT_PORT,
    default_pg_timeout,
)


def __getattr__(name):
    if name == "cdb":  # the carrier of this moment
        return process_group.cdb
    raise AttributeError(f"module 'deepspeed.comm.comm' has no attribute {name!r}")
